"""One peer in a process of its own, which compare.py starts: jobs come in as lines of JSON, results go out likewise.

    {"job": "warm", "workload": [8, 8192, 16, 128, 256], "operations": ["forward"]}
    {"job": "time", "workload": [...], "operations": ["forward", "training"], "min_time": 0.2}
    {"job": "step", "batch": 64, "min_time": 0.2}

Each is answered by some lines of results and one {"done": true}, or {"error": "..."}, with "ended": true where the
process is of no more use."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu import parts as gpu_parts
from benchmarks.paper.model import Workload

Answer = dict[str, Any]


def answers(name: str) -> Callable[[Answer], Iterator[Answer]]:
    """Whatever is imported and set up only once."""
    import torch

    from benchmarks.gpu import peers

    if name == gpu_parts.STEP_PEER:
        return lambda job: iter([{"seconds": peers.step_seconds(job["batch"], job["min_time"])}])
    peer = peers.PEERS[name]()

    def sequence(job: Answer) -> Iterator[Answer]:
        workload = Workload(*job["workload"])
        if job["job"] == "warm":
            yield from peer.warm(workload, job["operations"])
        else:
            yield from peer.time(workload, job["operations"], job["min_time"])
        if name == gpu_parts.ATTENTION:
            yield {"version": str(torch.backends.cudnn.version())}

    return sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=[*gpu_parts.TRITON_PEERS, gpu_parts.ATTENTION, gpu_parts.STEP_PEER])
    name = parser.parse_args().peer
    # Results have a channel of their own: whatever a library prints goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: Answer) -> None:
        print(json.dumps(answer), file=out, flush=True)

    try:  # before the first job, while others are still at work
        answer = answers(name)
    except Exception as reason:
        answer = refusing(reason)
    for line in sys.stdin:
        try:
            for result in answer(json.loads(line)):
                say(result)
            say({"done": True})
        except Exception as reason:  # a kernel that its compiler cannot build, say: reported, not hidden
            error = {"error": (str(reason) or type(reason).__name__).splitlines()[0]}
            say(error if usable() else error | {"ended": True})
        free()


def refusing(reason: Exception) -> Callable[[Answer], Iterator[Answer]]:
    def answer(_: Answer) -> Iterator[Answer]:
        raise reason

    return answer


def usable() -> bool:
    """Not after a kernel has read where it must not: then every later call fails, and the process has to end."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def free() -> None:
    """Memory back to the GPU, for the next process."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
