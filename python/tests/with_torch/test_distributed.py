"""Several gloo processes on the CPU: context parallel, DDP, FSDP2. What they do is in distributed_worker.py."""

import pytest

from ranks import run_ranks


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        ("context", 1),
        ("context", 2),
        ("context", 4),
        ("delta", 1),
        ("delta", 4),
        ("unused", 2),
        ("unused_delta", 2),
        ("data_parallel", 2),
        ("refuse_state_elsewhere", 2),
    ],
)
def test_ranks(what, ranks, tmp_path):
    run_ranks("distributed_worker.py", what, ranks=ranks, store=tmp_path / "store")
