"""What every rank of test_lm_scale.py runs: `python scale_worker.py DATA OUT RANK RANKS STORE`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm_inputs import small_model, small_recipe
from tfla.lm.training import train as training

# name: fields of the recipe, and of the model. Sizes are odd, so that two ranks have something to fill up; the larger
# model has several of DDP's buckets.
ODD: dict = {"layers": 3, "dim": 36, "heads": 3, "vocab": 321, "ffn_dim": 101}
RUNS: dict[str, tuple[dict, dict]] = {
    "ddp": ({}, ODD),
    "ddp, buckets": ({"batch": 2, "context": 16}, {"layers": 2, "dim": 1024, "heads": 4, "vocab": 1024}),
    "context, large states": (
        {"batch": 2, "context": 16, "context_parallel": 2}, {"layers": 2, "dim": 1024, "heads": 1, "vocab": 320},
    ),
    "ddp, micro-batches": ({"micro_batch": 1}, ODD),
    "fsdp": ({"parallel": "fsdp"}, ODD),
    "fsdp, micro-batches": ({"parallel": "fsdp", "micro_batch": 1}, ODD),
    "fsdp, checkpointed": ({"parallel": "fsdp", "checkpoint_activations": True}, ODD),
    "context": ({"context_parallel": 2}, ODD),
    "context, micro-batches, checkpointed": (
        {"context_parallel": 2, "micro_batch": 2, "checkpoint_activations": True}, {**ODD, "qk_factor": 1.0},
    ),
    "context-fsdp": ({"context_parallel": 2, "parallel": "fsdp"}, {**ODD, "v_factor": 2.0}),
}  # fmt: skip
# Where each collective has what a rank hands to it.
OPERATIONS = {
    "c10d.allreduce_": ("all-reduce", 0),
    "_c10d_functional.all_reduce": ("all-reduce", 0),
    "c10d._allgather_base_": ("all-gather", 1),
    "c10d._reduce_scatter_base_": ("reduce-scatter", 1),
}


def size(given: Any) -> int:
    tensors = [given] if isinstance(given, Tensor) else given
    return sum(x.numel() * x.element_size() for x in tensors)


class Collectives(TorchDispatchMode):
    """Counts what is handed to torch.distributed, from C++ (DDP) and from Python alike."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # comes again as what it does with its shards
            return NotImplemented
        name = str(function.overloadpacket)
        if name in OPERATIONS:
            operation, place = OPERATIONS[name]
            self.seen.append((operation, size(args[place])))
        elif "c10d" in name and "wait" not in name and "wrap" not in name:
            self.seen.append((name, 0))
        return function(*args, **(kwargs or {}))


def written() -> int:
    """Bytes that this process has written so far; in a step these are gloo's, to its sockets."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


class Trainer(training._Trainer):
    steps: list[list[tuple[str, int]]] = []
    memory: dict[str, int] = {}
    wire = 0  # bytes of the last step

    def _update(self) -> None:
        before = written()
        with Collectives() as collectives:
            super()._update()
        Trainer.wire = written() - before
        Trainer.steps.append(collectives.seen)
        parameters = [getattr(x, "_local_tensor", x) for x in self.model.parameters()]
        states = self.optimizer.state.values()
        moments = [getattr(x, "_local_tensor", x) for state in states for x in (state["exp_avg"], state["exp_avg_sq"])]
        Trainer.memory = {"parameters": size(parameters), "optimizer": size(moments)}


def main() -> None:
    data, out, rank, ranks, store = (
        Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5],
    )  # fmt: skip
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    training._Trainer = Trainer  # type: ignore[misc]
    sent = {}
    for name, (recipe, model) in RUNS.items():
        Trainer.steps = []
        run = training.Run(
            out / name, save_every=None, stop_after=4, tensorboard=False, progress=False, device="cpu", peak=1e9
        )
        training.train(small_model(**model), small_recipe(**recipe), data, run)
        assert len(Trainer.steps) == 4
        sent[name] = {"steps": Trainer.steps, "memory": Trainer.memory, "wire": Trainer.wire}
    (out / f"sent-{rank}.json").write_text(json.dumps(sent))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
