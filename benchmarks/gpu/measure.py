"""Takes the measurements of compare.py: tfla by its program, every peer in a process of its own."""

from __future__ import annotations

import json
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.versions import versions
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu.peer_process import WITHOUT_LLVM, PeerProcess
from benchmarks.paper.model import Workload

Row = dict[str, Any]
OPERATIONS = ("forward", "training")
BRIEF = 0.05  # seconds per timing of `tfla bench` where only the burst is wanted


def say(what: str, begin: float = time.monotonic()) -> None:
    sys.stderr.write(f"compare: {time.monotonic() - begin:5.0f} s  {what}\n")  # whole, from whatever thread
    sys.stderr.flush()


@dataclass
class Run:
    program: Path
    file: Path  # holds, at any moment, all that has been measured
    min_time: float
    limit: float
    replicas: int
    peers: list[str]
    lengths: tuple[int, ...] | None = None
    dims: tuple[int, ...] | None = None
    budget: float = float("inf")  # seconds, after which no other case is begun
    result: dict[str, Any] = field(default_factory=lambda: {"about": {}, "parts": {}})
    _sustained: list[Workload] = field(default_factory=list)  # timed call after call, too
    _own: dict[tuple[Workload, int, bool], dict[str, Row]] = field(default_factory=dict)
    _teams: dict[str, list[PeerProcess]] = field(default_factory=dict)  # the first one of each peer is timed
    _failures: dict[tuple[str, Workload], Row] = field(default_factory=dict)
    _begin: float = field(default_factory=time.monotonic)
    _left: list[str] = field(default_factory=list)

    # ---------------------------------------------------------------- tfla

    def bench(self, min_time: float, *options: str) -> dict[str, Any]:
        """One run of `tfla bench` on the GPU; raises subprocess.SubprocessError."""
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "bench.json"
            command = [str(self.program), "bench", "--device", "cuda", "--dtype", "bfloat16"]
            command += ["--formulation", "chunkwise", "--min-time", str(min_time), "--json", str(out), *options]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=self.limit)
            report: dict[str, Any] = json.loads(out.read_text())
        self.result["about"] |= {key: report[key] for key in ("tfla", "date", "gpu")}
        return report

    def tfla(
        self, workload: Workload, chunk: int = 0, operations: Iterable[str] = OPERATIONS, portable: bool = False
    ) -> dict[str, Row]:
        """A row per gate; a workload is measured once in a run."""
        if (workload, chunk, portable) in self._own:
            return self._own[workload, chunk, portable]
        say(f"{workload}: tfla" + (" portable" if portable else "") + (f", chunk {chunk}" if chunk else ""))
        # Forward and training apart: only training keeps states.
        rows: dict[str, Row] = {gpu_parts.own(gate, portable): {} for gate in ("exp", "sig")}
        min_time = self.min_time if workload in self._sustained and chunk == 0 else BRIEF
        for operation in operations:
            options = ["--op", operation, "--shape", str(workload), "--chunk", str(chunk)]
            options += ["--portable"] if portable else []
            try:
                report = self.bench(min_time, *options)
            except subprocess.SubprocessError as reason:
                words = (getattr(reason, "stderr", None) or str(reason)).strip().splitlines()[-1]
                for row in rows.values():
                    row[f"{operation}_error"] = words
                continue
            for found in report["sequences"]:
                row = rows[gpu_parts.own(found["gate"], portable)]
                row[operation] = found["burst_seconds"]["median"]
                row[f"{operation}_sustained"] = found["seconds"]["median"]
                if operation == "training":
                    row["peak_bytes"] = found["tensor_bytes"] + found["scratch_bytes"]
        self._own[workload, chunk, portable] = rows
        return rows

    # ---------------------------------------------------------------- peers

    def team(self, name: str, size: int = 1) -> list[PeerProcess]:
        members = self._teams.setdefault(name, [])
        members += [PeerProcess(name, self.limit) for _ in range(size - len(members))]
        return members

    def time_peer(self, name: str, workload: Workload, operations: Iterable[str], min_time: float) -> Row:
        row = dict(self._failures.get((name, workload), {}))
        wanted = [operation for operation in operations if f"{operation}_error" not in row]
        if not wanted:
            return row
        say(f"{workload}: {name}")
        job = {"job": "time", "workload": astuple(workload), "operations": wanted, "min_time": min_time}
        row |= self.team(name)[0].run(job)
        if version := row.pop("version", None):
            self.result["about"].setdefault("packages", {})["cuDNN"] = version
        return row

    def warm(self, workloads: list[Workload]) -> None:
        """Triton compiles for every shape anew, which takes longer than all the timing: several processes of each peer
        share the shapes and leave what they compiled in Triton's cache. What crashes here is not tried again. The
        process that is timed takes no part: whatever it chooses by trying, it should choose on a quiet GPU."""
        names = [name for name in gpu_parts.TRITON_PEERS if name in self.peers]
        if not names or self.replicas < 1:
            return
        say(f"compiling: {', '.join(names)} at {len(workloads)} shapes, {self.replicas} processes each")
        threads = []
        for name in names:
            todo: queue.SimpleQueue[Workload] = queue.SimpleQueue()
            for workload in workloads:
                todo.put(workload)
            first, *others = self.team(name, 1 + self.replicas)
            first.start()
            threads += [threading.Thread(target=self._compile, args=(one, todo), daemon=True) for one in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for team in self._teams.values():
            if any(one.environment == WITHOUT_LLVM for one in team) and team[0].environment != WITHOUT_LLVM:
                team[0].stop()
                team[0].environment = WITHOUT_LLVM

    def _compile(self, process: PeerProcess, todo: queue.SimpleQueue[Workload]) -> None:
        while True:
            try:
                workload = todo.get_nowait()
            except queue.Empty:
                return
            row = process.run({"job": "warm", "workload": astuple(workload), "operations": OPERATIONS})
            failed = {key: value for key, value in row.items() if key.endswith("_error")}
            if row.get("ended"):
                self._failures[process.name, workload] = failed
            reasons = dict.fromkeys(failed.values())
            say(f"{workload}: {process.name} " + (f"fails: {'; '.join(reasons)}" if failed else "compiled"))

    # ---------------------------------------------------------------- parts

    def late(self, part: str, what: object) -> bool:
        """Whether the time is up; then the case is remembered as left out."""
        if time.monotonic() - self._begin < self.budget:
            return False
        self._left.append(f"{part} {what}")
        return True

    def keep(self, part: str, key: str, case: dict[str, Any]) -> None:
        self.result["parts"].setdefault(part, {})[key] = case
        self.result["about"]["parts"] = list(self.result["parts"])
        self.save()

    def save(self) -> None:
        """By a new file that takes the place of the old one: whoever cuts the run short finds one of the two."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.result, indent=1) + "\n")
        new.replace(self.file)

    def sequences(self, part: str) -> None:
        """lengths, shapes and sweep: tfla, then the Triton peers."""
        min_time = self.min_time if part == "lengths" else 0.0
        workloads = gpu_parts.workloads(part, self.lengths, self.dims)
        if time.monotonic() - self._begin < self.budget:
            self.warm(workloads)
        for workload in workloads:
            if self.late(part, workload):
                continue
            rows = dict(self.tfla(workload))
            if part == "lengths":
                rows |= self.tfla(workload, portable=True)
            for name in gpu_parts.TRITON_PEERS:
                if name in self.peers:
                    rows[name] = self.time_peer(name, workload, OPERATIONS, min_time)
            self.keep(part, str(workload), {"workload": astuple(workload), "rows": rows})

    def attention(self) -> None:
        last: dict[str, float] = {}  # seconds per token of the sequence, from the length before
        for workload in sorted(gpu_parts.workloads("attention", self.lengths), key=lambda one: one.tokens):
            if self.late("attention", workload):
                continue
            rows = dict(self.tfla(workload))
            if gpu_parts.ATTENTION in self.peers:
                predicted = {operation: slope * workload.tokens for operation, slope in last.items()}
                skipped = {name: s for name, s in predicted.items() if s > gpu_parts.MOST_ATTENTION_SECONDS}
                wanted = [operation for operation in OPERATIONS if operation not in skipped]
                row = self.time_peer(gpu_parts.ATTENTION, gpu_parts.attention_workload(workload), wanted, 0.0)
                last |= {name: row[name] / workload.tokens for name in OPERATIONS if name in row}
                rows[gpu_parts.ATTENTION] = row | {f"{name}_skipped": s for name, s in skipped.items()}
            self.keep("attention", str(workload), {"workload": astuple(workload), "rows": rows})

    def memory(self) -> None:
        for workload in gpu_parts.workloads("memory"):
            for chunk in gpu_parts.MEMORY_CHUNKS:
                if self.late("memory", f"chunk {chunk or 'default'}"):
                    continue
                operations = OPERATIONS if chunk == 0 else ("training",)
                rows = self.tfla(workload, chunk, operations) | self.tfla(workload, chunk, operations, portable=True)
                key = f"{workload} chunk {chunk or 'default'}"
                self.keep("memory", key, {"workload": astuple(workload), "chunk": chunk, "rows": rows})

    def step(self) -> None:
        if self.late("step", "all"):
            return
        say("step: tfla")
        for found in self.bench(self.min_time, "--op", "step", "--gate", "exp")["steps"]:
            row = {"seconds": found["seconds"]["median"], "bytes_per_second": found["state_bytes_per_second"]}
            case = {"batch": found["batch"], "copy_bytes_per_second": found["copy_bytes_per_second"]}
            case["rows"] = {"tfla": row}
            if gpu_parts.STEP_PEER in self.peers:
                say(f"step, batch {found['batch']}: mlstm_kernels")
                job = {"job": "step", "batch": found["batch"], "min_time": self.min_time}
                case["rows"][gpu_parts.STEP_PEER] = self.team(gpu_parts.STEP_PEER)[0].run(job)
            self.keep("step", str(found["batch"]), case)

    def parts(self, wanted: list[str]) -> dict[str, Any]:
        about = self.result["about"]
        about["python"] = platform.python_version()
        about["packages"] = versions("torch", "triton", "mlstm_kernels", "fla-core")
        if "lengths" in wanted:
            self._sustained = gpu_parts.workloads("lengths", self.lengths)
        try:
            for part in wanted:
                own = {"attention": self.attention, "memory": self.memory, "step": self.step}.get(part)
                if own is not None:
                    own()
                else:
                    self.sequences(part)
        finally:
            for team in self._teams.values():
                for process in team:
                    process.stop()
        if self._left:
            say(f"left out, since {self.budget:g} s are over: {'; '.join(self._left)}")
        say("done")
        return self.result
