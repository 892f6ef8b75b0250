"""What every rank of test_lm_train.py runs: `python lm_worker.py DATA OUT RANK RANKS STORE`."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lm_inputs import small_model, small_recipe
from tfla.lm.training.lock import locked
from tfla.lm.training.metrics import read_log
from tfla.lm.training.train import Run, train

# name: fields of the recipe, and of the model
RUNS: dict[str, tuple[dict, dict]] = {
    "ddp": ({}, {}),
    "ddp accumulating": ({"micro_batch": 1}, {}),
    "fsdp": ({"parallel": "fsdp"}, {}),
    "fsdp accumulating, checkpointed": ({"parallel": "fsdp", "micro_batch": 1, "checkpoint_activations": True}, {}),
    "context": ({"context_parallel": 2}, {}),
    "context, fsdp": ({"context_parallel": 2, "parallel": "fsdp"}, {"gate": "sigmoid"}),
    "context, soft reset": ({"context_parallel": 2}, {"reset": "soft"}),
    "ddp, fixed input gate": ({}, {"train_input_gate": False}),
    "transformer, fsdp": ({"parallel": "fsdp"}, {"kind": "transformer"}),
}


def options(directory: Path, **changes) -> Run:
    return Run(
        directory, log_every=2, eval_every=6, tensorboard=False, progress=False, device="cpu", peak=1e9, **changes
    )


def main() -> None:
    data, out, rank, ranks, store = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5],
    )
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for name, (recipe, model) in RUNS.items():
        train(small_model(**model), small_recipe(**recipe), data, options(out / name))
    # Stopped after three steps, to be resumed by one process.
    train(small_model(), small_recipe(parallel="fsdp"), data, options(out / "stopped", stop_after=3))
    # A trainer of its own has the folder: both ranks are told.
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(locked(out / "taken"))
        try:
            train(small_model(), small_recipe(), data, options(out / "taken"))
        except BlockingIOError as error:
            assert "is being trained by" in str(error)
        else:
            raise AssertionError("two trainers in one folder")
        dist.barrier()
    # The last checkpoint is damaged: both ranks go on from the one before.
    train(small_model(), small_recipe(), data, options(out / "damaged", stop_after=4, save_every=2))
    if rank == 0:
        (out / "damaged" / "step-00000004" / "__1_0.distcp").unlink()
    dist.barrier()
    begun = train(small_model(), small_recipe(parallel="fsdp"), data, options(out / "damaged"))["begun_at"]
    if rank == 0:
        (out / "begun.json").write_text(json.dumps(begun))
        logs = {name: read_log(out / name / "log.jsonl") for name in RUNS}
        (out / "logs.json").write_text(json.dumps(logs))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
