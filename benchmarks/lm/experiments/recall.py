"""Associative recall (MQAR, Arora et al. 2023): keys with their values, then keys whose values are to be said.

A row is N pairs `key value`, with keys that differ, then `QUERIES` of the keys in random order, each followed by its
value; only the values after queries count. One small model learns rows of several N at once; its accuracy is measured
for each N, some of them beyond those that it has seen.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lm.experiments.common import about, say
from benchmarks.lm.experiments.results import add_line, lines
from benchmarks.lm.experiments.tables import MODELS
from tfla.lm import LanguageModel, ModelConfig, Recipe
from tfla.lm.training.loss import IGNORED
from tfla.lm.training.optimizer import learning_rate, make_optimizer


@dataclass(frozen=True)
class Task:
    keys: int = 16
    values: int = 16
    queries: int = 16
    trained: tuple[int, ...] = (2, 4, 8)
    asked: tuple[int, ...] = (2, 4, 8, 12, 16)
    layers: int = 2
    dim: int = 64
    heads: int = 4
    batch: int = 64
    steps: int = 3000
    lr: float = 3e-3
    # The paper's input gates begin at -10 and take up next to nothing; its forget gates all begin with long memories,
    # but who binds a value to the key before it needs a short one.
    input_gate_bias: float = 0.0
    forget_gate_bias: tuple[float, float] = (-3.0, 6.0)
    tests: int = 256  # rows per number of pairs

    @property
    def vocab(self) -> int:
        return self.keys + self.values


TASK = Task()
SEEDS = 3
FILE = "recall.jsonl"


def rows(task: Task, pairs: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets (count, 2 * (pairs + queries)); targets are IGNORED but for the values of queries."""
    if not 0 < pairs <= task.keys:
        raise ValueError(f"tfla: pairs is {pairs}; it must be from 1 to the {task.keys} keys")

    def shuffled(size: int) -> Tensor:
        return torch.rand(count, size, generator=generator).argsort(dim=1)

    keys = shuffled(task.keys)[:, :pairs]
    values = torch.randint(task.keys, task.vocab, (count, pairs), generator=generator)
    # Every key is asked as often as any other, up to one.
    rounds = [shuffled(pairs) for _ in range(-(-task.queries // pairs))]
    asked = torch.cat(rounds, dim=1)[:, : task.queries]
    order = torch.cat([torch.arange(pairs).expand(count, pairs), asked], dim=1)
    inputs = torch.stack([keys.gather(1, order), values.gather(1, order)], dim=2).flatten(1)
    targets = torch.full_like(inputs, IGNORED)
    targets[:, 2 * pairs :: 2] = inputs[:, 2 * pairs + 1 :: 2]
    return inputs, targets


@torch.no_grad()
def accuracy(model: LanguageModel, task: Task, pairs: int, seed: int) -> float:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + pairs)
    inputs, targets = rows(task, pairs, task.tests, generator)
    said = torch.cat([model(part.to(device)).argmax(dim=-1).cpu() for part in inputs.split(task.batch)])
    counts = targets != IGNORED
    return (said[counts] == targets[counts]).double().mean().item()


def config(task: Task, model: str) -> ModelConfig:
    fields = {"layers": task.layers, "dim": task.dim, "heads": task.heads, "vocab": task.vocab}
    gates = {"input_gate_bias": task.input_gate_bias, "forget_gate_bias": task.forget_gate_bias}
    return ModelConfig(**fields, **gates, **MODELS[model])


def learn(task: Task, model: str, seed: int, device: str) -> dict[str, Any]:
    """One model of one seed: the same rows in the same order for every model."""
    plan = Recipe(
        lr=task.lr, batch=task.batch, steps=task.steps, context=2 * (max(task.trained) + task.queries),
        warmup=task.steps // 10, cooldown=task.steps // 10, seed=seed, clip=1.0,
    )  # fmt: skip
    torch.manual_seed(seed)
    network = LanguageModel(config(task, model)).to(device)
    optimizer = make_optimizer(network, plan)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    begin = time.monotonic()
    for step in range(task.steps):
        pairs = task.trained[step % len(task.trained)]
        inputs, targets = (x.to(device) for x in rows(task, pairs, task.batch, generator))
        loss = network(inputs, targets).total / (task.batch * task.queries)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), plan.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    network.eval()
    width = max(task.steps // 50, 1)
    curve = torch.stack(losses).cpu()[: width * (len(losses) // width)].unflatten(0, (-1, width)).mean(dim=1)
    return {
        "about": about(device), "task": dataclasses.asdict(task), "model": model, "seed": seed,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "seconds": round(time.monotonic() - begin, 2), "loss": [round(value, 4) for value in curve.tolist()],
        "accuracy": {str(pairs): accuracy(network, task, pairs, seed) for pairs in task.asked},
    }  # fmt: skip


def todo(folder: Path) -> list[tuple[str, int]]:
    """(model, seed) of what has no result yet; a seed is complete before the next begins."""
    done = lines(folder / FILE)
    return [(model, seed) for seed in range(SEEDS) for model in MODELS if _name(model, seed) not in done]


def _name(model: str, seed: int) -> str:
    return f"{model},seed={seed}"


def work(folder: Path, device: str, budget: float, task: Task = TASK) -> None:
    begin = time.monotonic()
    for model, seed in todo(folder):
        if time.monotonic() - begin >= budget:
            break
        result = learn(task, model, seed, device)
        add_line(folder / FILE, _name(model, seed), result)
        said = ", ".join(f"{pairs} pairs {100 * value:.1f} %" for pairs, value in result["accuracy"].items())
        say(f"recall: {model}, seed {seed}: {said}; {result['seconds']:.0f} s")
    say(f"{len(todo(folder))} of {SEEDS * len(MODELS)} runs are left")


def listing(folder: Path) -> str:
    left, runs = len(todo(folder)), SEEDS * len(MODELS)
    seconds = [result["seconds"] for result in lines(folder / FILE).values()]
    longest = f"{max(seconds):,.0f}" if seconds else "?"
    need = "0" if not left else f"{left * max(seconds):,.0f}" if seconds else "?"
    row = f"{'recall':<20} {runs:>4} {runs - left:>5} {'':>15} {longest:>13} {need:>13}  measured seconds"
    return f"{row}\n    associative recall, on a CPU"
