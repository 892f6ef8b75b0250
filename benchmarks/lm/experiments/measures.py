"""What a trained model is asked: loss over the position up to contexts longer than those of training, and its gates."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tfla.lm.data import Dataset
from tfla.lm.data.dataset import make_batch
from tfla.lm.model import LanguageModel

BEYOND = 8  # times the training context
BINS_OF_CONTEXT = 4
FEWEST_ROWS = 4


def long_rows(data: Dataset, length: int, most: int) -> Tensor:
    """(N,length) tokens: stretches of documents, none of which holds a boundary, spread evenly over the split."""
    stream = data.stream(0, data.tokens)
    ends = np.flatnonzero(stream == data.eod)
    begins = np.concatenate([[0], ends[:-1] + 1])
    found = [
        stream[place : place + length]
        for begin, end in zip(begins, ends, strict=True)
        for place in range(begin, end - length + 1, length)
    ]
    if len(found) < FEWEST_ROWS:
        raise ValueError(
            f"tfla: split {data.split!r} of {data.directory} has {len(found)} stretches of {length} tokens within a "
            f"document; loss over position needs {FEWEST_ROWS}"
        )
    chosen = np.linspace(0, len(found) - 1, min(len(found), most)).round().astype(int)
    return torch.from_numpy(np.stack([found[j] for j in chosen]).astype(np.int64))


@torch.no_grad()
def loss_by_position(model: LanguageModel, data: Dataset, context: int, *, most: int = 32) -> dict[str, Any]:
    """Mean loss of every quarter of a context, on rows of BEYOND contexts that begin with an empty state."""
    device = next(model.parameters()).device
    rows = long_rows(data, BEYOND * context, most)
    width = max(context // BINS_OF_CONTEXT, 1)
    total = torch.zeros(rows.shape[1] // width, dtype=torch.float64)
    for row in rows:
        batch = make_batch(row[None], data.eod)
        losses = model(batch.inputs.to(device), batch.targets.to(device)).tokens
        total += losses[0].double().cpu().unflatten(0, (-1, width)).mean(dim=1)
    return {
        "context": context, "rows": len(rows), "tokens_per_bin": width,
        "loss": [round(value, 5) for value in (total / len(rows)).tolist()],
    }  # fmt: skip


class _Sums:
    """Count, sum, sum of squares, least and largest of what a hook sees, per head."""

    def __init__(self, cap: float | None) -> None:
        self.cap, self.count = cap, 0
        self.total = self.squares = 0.0
        self.least, self.largest = float("inf"), float("-inf")

    def __call__(self, module: nn.Module, given: Any, result: Tensor) -> None:
        values = result.detach().double()
        if self.cap is not None:
            values = self.cap * torch.tanh(values / self.cap)
        self.count += values.numel()
        self.total += values.sum().item()
        self.squares += values.square().sum().item()
        self.least = min(self.least, values.min().item())
        self.largest = max(self.largest, values.max().item())

    def summary(self) -> dict[str, float]:
        mean = self.total / self.count
        deviation = max(self.squares / self.count - mean * mean, 0.0) ** 0.5
        values = {"mean": mean, "deviation": deviation, "least": self.least, "largest": self.largest}
        return {name: round(value, 4) for name, value in values.items()}


@torch.no_grad()
def gates(model: LanguageModel, data: Dataset, *, rows: int = 8) -> dict[str, list[dict[str, float]]] | None:
    """Pre-activations after the cap, layer by layer, of input and forget gates on the first rows of a split."""
    layers: list[Any] = list(model.blocks)
    if not hasattr(layers[0].mix, "cell"):
        return None
    device = next(model.parameters()).device
    sums: dict[str, list[_Sums]] = {"input": [], "forget": []}
    handles = []
    for layer in layers:
        cell = layer.mix.cell
        for name, gate in (("input", cell.input_gate), ("forget", cell.forget_gate)):
            sums[name].append(_Sums(cell.soft_cap))
            handles.append(gate.register_forward_hook(sums[name][-1]))
    try:
        for row in range(min(rows, data.rows)):
            batch = data.batch([row]).to(device)
            model(batch.inputs, batch.targets, batch.documents)
    finally:
        for handle in handles:
            handle.remove()
    return {name: [layer.summary() for layer in found] for name, found in sums.items()}
