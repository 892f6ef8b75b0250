"""One run of a table: trained in pieces where it has to be, then judged, all in one result."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.lm.experiments import curves, measures
from benchmarks.lm.experiments.common import about
from benchmarks.lm.experiments.tables import SIZES, Run
from tfla.lm import ModelConfig, Recipe, preset, recipe
from tfla.lm.commands.flags import load
from tfla.lm.data import Dataset
from tfla.lm.training import train as training
from tfla.lm.training.checkpoint import latest
from tfla.lm.training.metrics import read_log

SAVE_EVERY = 1000


def configs(run: Run, vocab: int, lr: float, device: str) -> tuple[ModelConfig, Recipe]:
    size = SIZES[run.size][0]
    return preset(size, vocab=vocab, **run.model_fields()), recipe(size, **run.recipe_fields(lr, device))


def describe(data: Path, context: int) -> dict[str, Any]:
    """Which tokens: results on others are not compared."""
    dataset = Dataset(data, "train", context)
    return {"fingerprint": f"{dataset.fingerprint():08x}", "tokens": dataset.tokens, "vocab": dataset.vocab}


def train(run: Run, data: Path, lr: float, scratch: Path, device: str, limit: float | None) -> dict[str, Any] | None:
    """The result of a run, or None where the limit of seconds has stopped it; its checkpoint then lies in scratch."""
    begin = time.monotonic()
    config, plan = configs(run, training.vocabulary(Dataset(data, "train", run.context)), lr, device)
    directory = scratch / run.table / run.name
    how = training.Run(
        directory, log_every=20, save_every=SAVE_EVERY, keep=1, time_limit=limit, tensorboard=False, progress=False,
        device=device,
    )  # fmt: skip
    try:
        summary = training.train(config, plan, data, how)
        failed = None
    except RuntimeError as error:  # a run whose loss is not finite is a result
        if "checkpoints before it are kept" not in str(error):
            raise
        summary, failed = {"finished": True, "begun_at": None}, str(error).removeprefix("tfla: ")
    if not summary["finished"]:
        return None
    lines = [line for line in read_log(directory / "log.jsonl") if "loss" in line]
    result = {
        "about": about(device), "data": describe(data, plan.context), "model": dataclasses.asdict(config),
        "lr": lr, "steps": plan.steps, "context": plan.context, "batch": plan.batch, "seed": plan.seed,
        "failed": failed, "validation_loss": None, **curves.reduced(lines, plan.warmup),
    }  # fmt: skip
    if failed is None:
        result |= judge(directory, data, plan, device, run.rows)
    # Of a run in one piece, its judgement included; the rest of one that was interrupted says nothing.
    result["seconds"] = round(time.monotonic() - begin, 2) if summary["begun_at"] == 0 else None
    shutil.rmtree(directory)
    return result


def judge(directory: Path, data: Path, plan: Recipe, device: str, rows: int | None) -> dict[str, Any]:
    """Of the last checkpoint, which is too large to travel: what the page says about a trained model."""
    from tfla.lm.evaluate import evaluate

    found = latest(directory)
    assert found is not None
    model, _ = load(found, device)
    validation = Dataset(data, "validation", plan.context)
    result = evaluate(model, validation, batch=plan.batch, max_rows=rows)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "validation_loss": result.loss, "validation_perplexity": math.exp(result.loss),
        "positions": measures.loss_by_position(model, validation, plan.context),
        "gates": measures.gates(model, validation),
    }  # fmt: skip
