"""Several gloo processes on the CPU: context parallel, DDP, FSDP2. What they do is in distributed_worker.py."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        ("context", 1),
        ("context", 2),
        ("context", 4),
        ("unused", 2),
        ("data_parallel", 2),
        ("refuse_state_elsewhere", 2),
    ],
)
def test_ranks(what, ranks, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, what, str(rank), str(ranks), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [output for process, output in zip(processes, outputs, strict=True) if process.returncode != 0]
    assert not failed, failed[0]
