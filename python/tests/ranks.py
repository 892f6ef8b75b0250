"""Several processes of one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(worker: str, *arguments: object, ranks: int, store: Path) -> None:
    """Starts `worker ARGUMENTS RANK RANKS STORE` for each rank and waits; what a failed one wrote is the message."""
    program = next(Path(__file__).parent.rglob(worker))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # what this process imports
    processes = [
        subprocess.Popen(
            [sys.executable, program, *map(str, arguments), str(rank), str(ranks), store],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [output for process, output in zip(processes, outputs, strict=True) if process.returncode != 0]
    assert not failed, failed[0]
