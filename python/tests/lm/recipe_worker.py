"""What every rank of test_lm_recipe.py runs: `python recipe_worker.py DATA OUT RANK RANKS STORE`."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lm_inputs import small_model, small_recipe
from tfla.lm import ModelConfig, Recipe
from tfla.lm.training.train import Run, train

# Three phases of the rate in six steps, some of them clipped. The cap of the logits, the decay and Adam's eps are so
# large that each matters. The eps of the cell's norm and Adam's keep float32's rounding from growing: without them a
# state or a gradient that is nearly zero is scaled up to full size.
MODEL = {"logit_soft_cap": 1.0, "zero_output_gate": False, "cell_norm_eps": 1e-2}
RECIPE = {
    "lr": 2e-2, "steps": 6, "warmup": 2, "cooldown": 2, "betas": (0.8, 0.9), "adam_eps": 1e-3, "weight_decay": 0.5,
    "clip": 1.5,
}  # fmt: skip

# name: processes, fields of the recipe, and of the model
RUNS: dict[str, tuple[int, dict, dict]] = {
    "plain": (1, {}, {}),
    "another seed": (1, {"seed": 5}, {}),
    "micro-batches": (1, {"micro_batch": 1}, {}),
    "micro-batches, checkpointed": (1, {"micro_batch": 2, "checkpoint_activations": True}, {}),
    "sigmoid gate, no cap": (1, {}, {"gate": "sigmoid", "logit_soft_cap": None}),
    "fixed input gate": (1, {}, {"train_input_gate": False}),
    "transformer": (1, {}, {"kind": "transformer"}),
    "ddp": (2, {}, {}),
    "ddp, micro-batches": (2, {"micro_batch": 1}, {}),
    "fsdp": (2, {"parallel": "fsdp"}, {}),
    "fsdp, micro-batches": (2, {"parallel": "fsdp", "micro_batch": 1}, {}),
    "context": (2, {"context_parallel": 2}, {}),
    "context, micro-batches": (2, {"context_parallel": 2, "micro_batch": 2}, {}),
    "context, fsdp": (2, {"context_parallel": 2, "parallel": "fsdp"}, {}),
}


def configuration(name: str) -> tuple[ModelConfig, Recipe]:
    _, recipe, model = RUNS[name]
    return small_model(**{**MODEL, **model}), small_recipe(**{**RECIPE, **recipe})


def report(directory: Path, **changes: Any) -> Run:
    return Run(directory, log_every=2, keep=6, tensorboard=False, progress=False, device="cpu", peak=1e9, **changes)


def run(name: str, data: Path, out: Path) -> None:
    config, recipe = configuration(name)
    train(config, recipe, data, report(out / name, save_every=1 if name == "plain" else 3))


def main() -> None:
    data, out, rank, ranks, store = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    for name, (processes, _, _) in RUNS.items():
        if processes == int(ranks):
            run(name, data, out)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
