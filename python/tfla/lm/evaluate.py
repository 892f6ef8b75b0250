"""Loss, perplexity and bits per byte of a model on a split, and loss over the position in a document."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tfla.lm.checks import bare_name, check_positive
from tfla.lm.data import Dataset, tokenizer
from tfla.lm.training.loss import IGNORED
from tfla.lm.training.parallel import World

BUCKETS = 32  # of positions: [2^j - 1, 2^(j+1) - 1)


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean over tokens, in nats
    perplexity: float
    bits_per_byte: float  # by the mean bytes per token of the split
    tokens: int
    positions: list[dict[str, Any]]  # {"from", "to", "loss", "tokens"}: positions in a document, both inclusive


def positions(starts: Tensor) -> Tensor:
    """(B,T): how many tokens of its document, or of its row if that begins later, come before each."""
    place = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    return place - torch.where(starts, place, 0).cummax(dim=1).values


def check_tokens(data: Dataset, checkpoint: Path, meta: dict[str, Any]) -> None:
    """Refuses data of another tokenizer than a checkpoint's, whose loss would say nothing. meta: checkpoint.json."""
    ours, theirs = meta["tokenizer"], data.meta["tokenizer"]
    advice = "prepare the text with the model's tokenizer"
    if ours is None:  # imported without one
        return
    if "bytes" in (ours, theirs):
        if ours != theirs:
            raise ValueError(f"tfla: {data.directory} has tokens of {theirs}, {checkpoint} of {ours}; {advice}")
    else:
        files = data.directory / theirs, checkpoint / bare_name(ours, checkpoint)
        if not tokenizer.same(*files):
            raise ValueError(f"tfla: {files[0]} is another tokenizer than {files[1]}; {advice}")
    if meta["eod"] != data.eod:
        raise ValueError(
            f"tfla: {data.directory} ends documents with token {data.eod}, {checkpoint} with {meta['eod']}; {advice}"
        )


def _check_vocabulary(model: nn.Module, data: Dataset) -> None:
    config = getattr(getattr(model, "module", model), "config", None)  # DistributedDataParallel holds it inside
    vocab = getattr(config, "vocab", data.vocab)
    if data.vocab > vocab:
        raise ValueError(f"tfla: {data.directory} has tokens up to {data.vocab - 1}; the model has {vocab}")


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Dataset, *, batch: int = 8, max_rows: int | None = None, world: World | None = None
) -> Evaluation:
    """Over all rows of a split, the last short one included, or the first max_rows. Every rank calls it."""
    check_positive("batch", batch)
    if max_rows is not None:
        check_positive("rows", max_rows, ", or None for all")
    _check_vocabulary(model, data)
    world = world or World(device=next(model.parameters()).device)
    rows = data.rows if max_rows is None else min(data.rows, max_rows)
    if rows == 0:
        raise ValueError(f"tfla: split {data.split!r} of {data.directory} is empty; there is nothing to evaluate on")
    sums = torch.zeros(2, BUCKETS, dtype=torch.float64, device=world.device)
    at_once = batch * world.data_ranks
    for begin in range(0, rows, at_once):
        mine = [begin + world.data_rank * batch + j for j in range(batch)]
        # Sharded models are called by all ranks: rows behind the last one are empty, and nothing of them counts.
        whole = data.batch([row if row < rows else data.rows for row in mine])
        place = positions(whole.documents.starts)
        part = whole
        if world.context_ranks > 1:
            part = whole.stretch(world.place, world.context_ranks)
            place = place[:, world.place * part.inputs.shape[1] :][:, : part.inputs.shape[1]]
        part = part.to(world.device)
        losses = model(part.inputs, part.targets, part.documents).tokens
        counts = part.targets != IGNORED
        bucket = torch.log2(place.to(world.device).double() + 1).long()[counts]
        sums[0].index_add_(0, bucket, losses[counts].double())
        sums[1].index_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
    total, tokens = world.sum(sums).cpu()
    loss = (total.sum() / tokens.sum()).item()
    table = [
        {"from": 2**j - 1, "to": 2 ** (j + 1) - 2, "loss": (total[j] / tokens[j]).item(), "tokens": int(tokens[j])}
        for j in range(BUCKETS)
        if tokens[j] > 0
    ]
    return Evaluation(
        loss=loss, perplexity=math.exp(min(loss, 700.0)), bits_per_byte=loss / math.log(2) / data.bytes_per_token(),
        tokens=int(tokens.sum()), positions=table,
    )  # fmt: skip
