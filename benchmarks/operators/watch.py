"""A process that measures into a file, watched: one that dies or falls silent has its reason written there, and another
goes on where it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BROKEN = 75  # exit status of a process that can do no more on its GPU, and has left the reason in the file
MOST_PROCESSES = 30
STARTING = 120.0  # seconds that a process may import and set up for
Row = dict[str, Any]
Content = dict[str, Any]


def save(file: Path, content: Content) -> None:
    """By a new file that takes the place of the old one: whoever cuts the run short finds one of the two."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(file)


def say(what: str) -> None:
    print(f"{datetime.now():%H:%M:%S}  {what}", file=sys.stderr, flush=True)


def watch(command: list[str], file: Path, limit: float, most: float) -> None:
    """Runs the command until it ends well. limit: seconds without a change of the file; most: seconds in all."""
    end = time.monotonic() + most
    for _ in range(MOST_PROCESSES):
        why = ended(subprocess.Popen(command, cwd=ROOT, start_new_session=True), file, limit, end)
        if why is None:
            return
        if why == f"ended with exit status {BROKEN}":
            continue
        content = json.loads(file.read_text())
        begun = [row for row in content["rows"].values() if "begun" in row]
        for row in begun:
            name = row.pop("begun")
            row["sides"][name] = {"error": why}
            say(f"  {name}: {why}")
        save(file, content)
        if time.monotonic() > end:
            return
        if not begun:
            raise SystemExit(f"benchmarks: the process that measures {why} before it began anything")
    raise SystemExit(f"benchmarks: {MOST_PROCESSES} processes were not enough")


def ended(process: subprocess.Popen[bytes], file: Path, limit: float, end: float) -> str | None:
    """Why it did not end well."""
    seen, changed, allowed = file.stat().st_mtime_ns, time.monotonic(), max(limit, STARTING)
    try:
        while (status := process.poll()) is None:
            time.sleep(0.1)
            if (stamp := file.stat().st_mtime_ns) != seen:
                seen, changed, allowed = stamp, time.monotonic(), limit
            if time.monotonic() - changed > allowed:
                return f"no result within {allowed:g} s"
            if time.monotonic() > end:
                return "the time was up"
        if status == 0:
            return None
        return f"ended with {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
