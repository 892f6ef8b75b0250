"""A peer in a child process with a time limit: one that crashes or hangs costs its own row and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
# Some Triton aborts in an assertion of LLVM while it compiles; without LLVM's passes it does not.
PLAIN: dict[str, str] = {}
WITHOUT_LLVM = {"DISABLE_LLVM_OPT": "1"}
TOO_LATE = "no result within"  # how the error of a process begins that was ended for its silence


class PeerProcess:
    """Started at the first job, and again after a crash: then, and from there on, without LLVM's passes."""

    def __init__(self, name: str, limit: float, command: list[str] | None = None) -> None:
        """limit: seconds of silence, after which the process is ended. command: instead of the worker, for tests."""
        self.name, self.limit = name, limit
        self.command = command or [sys.executable, "-m", "benchmarks.gpu.worker", name]
        self.environment = PLAIN
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process

    def start(self) -> None:
        if self._process is not None:
            return
        self._log.seek(0)
        self._log.truncate()
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | self.environment,
            start_new_session=True,  # so that the compilers it starts can be ended with it
        )
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def stop(self) -> None:
        """Ends the process and whatever it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, job: dict[str, Any]) -> Row:
        """The results, and where there is not one of everything that was asked for, the reason in OPERATION_error;
        `ended` where that took the process with it."""
        row = self._run(job)
        if "crash" in row and self.environment == PLAIN:
            self.environment = WITHOUT_LLVM
            row = self._run(job)
        if "crash" in row:
            row["ended"] = True
        if reason := row.pop("crash", None) or row.pop("error", None):
            for operation in job.get("operations", ["seconds"]):
                if operation not in row:
                    row[f"{operation}_error"] = reason
        return row | ({"without_llvm": True} if self.environment == WITHOUT_LLVM else {})

    def _run(self, job: dict[str, Any]) -> Row:
        self.start()
        assert self._process is not None and self._process.stdin is not None
        row: Row = {}
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"crash": self._last_words()}
        while not row.pop("done", False) and "error" not in row:
            try:
                line = self._lines.get(timeout=self.limit)
            except queue.Empty:
                self.stop()
                return row | {"error": f"{TOO_LATE} {self.limit:g} s", "ended": True}
            if line is None:
                return row | {"crash": self._last_words()}
            row |= json.loads(line)
        if "ended" in row:
            self.stop()
        return row

    def _last_words(self) -> str:
        if self._process is None:  # ended from outside while it worked
            return "stopped"
        status = self._process.wait()
        self.stop()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self._log.seek(0)
        words = [line.strip() for line in self._log if line.strip()]
        return f"ended with {how}" + (f": {words[-1][:160]}" if words else "")
