"""What docs/lm.md says of training, written out in plain PyTorch and float64, to compare the trainer with.

Of tfla.lm only the model's logits and the order of rows are taken, which have tests of their own. Documents go through
the model one by one, so nothing is packed, sliced, accumulated or spread over processes here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.lm import LanguageModel, ModelConfig, Recipe
from tfla.lm.data import Dataset, Order


class Step(NamedTuple):
    """After one update."""

    loss: float  # per token, before it
    norm: float  # of the gradient, before clipping
    rate: float
    weights: dict[str, Tensor]


def rate(recipe: Recipe, step: int) -> float:
    """Of update `step`, from 0: a line from 0 to the peak, a cosine to min_lr of it, a line that is 0 after the end."""
    low, cooling = recipe.lr * recipe.min_lr, recipe.steps - recipe.cooldown
    if step >= cooling:
        return low * (recipe.steps - step) / recipe.cooldown if recipe.cooldown else low
    if step < recipe.warmup:
        return step / recipe.warmup * recipe.lr
    quarter = (step - recipe.warmup) / (cooling - recipe.warmup) * math.pi / 2
    return low + (recipe.lr - low) * math.cos(quarter) ** 2


def documents(row: list[int], eod: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of each document, or part of one, in a row of targets."""
    begin = 0
    for end in range(1, len(row) + 1):
        if end == len(row) or row[end - 1] == eod:
            yield torch.tensor([[eod, *row[begin : end - 1]]]), torch.tensor(row[begin:end])
            begin = end


def decayed(model: nn.Module) -> set[str]:
    """Weights of linear layers; no bias, norm or embedding is one."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def loss_of(model: nn.Module, rows: list[list[int]], eod: int, cap: float | None) -> Tensor:
    """The mean over all tokens of all rows."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        for inputs, targets in documents(row, eod):
            logits = model(inputs)[0]
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            total = total + F.cross_entropy(logits, targets, reduction="sum")
    return total / sum(len(row) for row in rows)


def train(config: ModelConfig, recipe: Recipe, data: Dataset) -> Iterator[Step]:
    torch.manual_seed(recipe.seed)
    model = LanguageModel(dataclasses.replace(config, logit_soft_cap=None), torch.float64).double()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with_decay = decayed(model)
    first, second = ({name: torch.zeros_like(weight) for name, weight in trained.items()} for _ in range(2))
    stream = data.stream(0, data.tokens).tolist()
    order = Order(len(stream) // recipe.context, recipe.seed)
    b1, b2 = recipe.betas
    for step in range(recipe.steps):
        chosen = [order.row(step * recipe.batch + place) for place in range(recipe.batch)]
        rows = [stream[row * recipe.context : (row + 1) * recipe.context] for row in chosen]
        loss = loss_of(model, rows, data.eod, config.logit_soft_cap)
        gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        lr = rate(recipe, step)
        with torch.no_grad():
            for name, weight in trained.items():
                g = gradients[name] * min(1.0, recipe.clip / norm)
                first[name] = b1 * first[name] + (1 - b1) * g
                second[name] = b2 * second[name] + (1 - b2) * g**2
                m, v = first[name] / (1 - b1 ** (step + 1)), second[name] / (1 - b2 ** (step + 1))
                if name in with_decay:
                    weight *= 1 - lr * recipe.weight_decay
                weight -= lr * m / (v.sqrt() + recipe.adam_eps)
        yield Step(loss.item(), norm, lr, {name: w.detach().clone() for name, w in model.state_dict().items()})
