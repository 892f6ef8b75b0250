"""The runs of every comparison, as tables: who trains on how many tokens, with which seed and rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "exp": {"gate": "exp"},
    "sigmoid": {"gate": "sigmoid"},
    "transformer": {"kind": "transformer"},
}
# Fields of a preset that differ: 40m has the paper's proportions of width, heads and layers.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "160m": ("160m", {}),
    "40m": ("tiny", {"layers": 8, "dim": 512, "heads": 4}),
    "10m": ("tiny", {"layers": 6, "dim": 256, "heads": 4}),
    "tiny": ("tiny", {}),
}
HEADS = {("40m", "transformer"): 8}  # of 64, as all sizes of the Transformer have
# Tokens and rows of a step. Few held-out documents have eight times 2,048 tokens, so 40m is asked at eight times 1,024.
STEP = {"160m": (2048, 16), "40m": (1024, 32)}
BIASES = (0.0, -2.0, -5.0, -10.0)
EPSILONS = (1e-2, 1e-6, 1e-8)


@dataclass(frozen=True)
class Run:
    table: str
    size: str
    model: str  # of MODELS
    tokens: int
    seed: int
    lr: float | None  # none: the best of the sweep for this size and model
    context: int
    batch: int
    compile: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the model
    rows: int | None = None  # of the validation split that count; none: all

    @property
    def name(self) -> str:
        parts = [self.size, self.model]
        parts += [f"{name.replace('_', '-')}={value:g}" for name, value in self.changes.items()]
        if self.table.startswith("sweep"):
            parts.append(f"lr={self.lr:g}")
        return ",".join([*parts, f"seed={self.seed}"])

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.context * self.batch))

    def model_fields(self) -> dict[str, Any]:
        fields = {**SIZES[self.size][1], **MODELS[self.model], **self.changes}
        if (self.size, self.model) in HEADS:
            fields["heads"] = HEADS[self.size, self.model]
        return fields

    def recipe_fields(self, lr: float, device: str) -> dict[str, Any]:
        """A schedule of the paper's shape over few steps: a tenth of them warms up, a tenth cools down."""
        return {
            "lr": lr, "steps": self.steps, "warmup": self.steps // 10, "cooldown": self.steps // 10,
            "context": self.context, "batch": self.batch, "seed": self.seed,
            "compile": self.compile and device == "cuda",
        }  # fmt: skip


def _sweep(size: str, tokens: int, rates: tuple[float, ...]) -> Iterator[Run]:
    for model in MODELS:
        for lr in rates:
            yield Run(f"sweep-{size}", size, model, tokens, 0, lr, *STEP[size])


def _compare(size: str, tokens: int, seeds: int = 3) -> Iterator[Run]:
    for seed in range(seeds):
        for model in MODELS:
            if model != "transformer" or seed == 0:
                yield Run(f"compare-{size}", size, model, tokens, seed, None, *STEP[size])


def _ablations(table: str, tokens: int, seeds: int) -> Iterator[Run]:
    for seed in range(seeds):
        for bias in BIASES:
            for eps in EPSILONS:
                changes = {"input_gate_bias": bias, "cell_norm_eps": eps}
                yield Run(table, "10m", "exp", tokens, seed, 3e-3, 1024, 32, False, changes)
            changes = {"input_gate_bias": bias, "cell_norm_eps": 1e-6}
            yield Run(table, "10m", "sigmoid", tokens, seed, 3e-3, 1024, 32, False, changes)


def _short() -> Iterator[Run]:
    for model in MODELS:
        yield Run("short-160m", "160m", model, 200 * 8 * 4096, 0, 3e-3, 4096, 8)


def _quick() -> Iterator[Run]:
    """The smallest of everything, for a CPU: whether it runs, not what follows."""
    for seed in range(2):
        for model in MODELS:
            yield Run("quick", "tiny", model, 4 * 4 * 64, seed, 3e-3, 64, 4, False, rows=16)


# In the order of the page. A seed is complete before the next begins, so an interruption leaves whole comparisons.
TABLES: dict[str, tuple[str, Callable[[], Iterator[Run]]]] = {
    "sweep-160m": ("learning rates of the 160m shape", lambda: _sweep("160m", 16_000_000, (1e-3, 2e-3, 4e-3))),
    "sweep-40m": ("learning rates of 40m", lambda: _sweep("40m", 24_000_000, (1.5e-3, 3e-3, 6e-3))),
    "compare-160m": ("the models, 160m shape", lambda: _compare("160m", 100_000_000)),
    "compare-40m": ("the models, 40m", lambda: _compare("40m", 200_000_000)),
    "ablations": ("input gate bias and norm eps", lambda: _ablations("ablations", 16_000_000, 3)),
    "short-160m": ("the models, 160m shape, 200 steps", _short),
    "short-ablations": (
        "input gate bias and norm eps, 150 steps",
        lambda: _ablations("short-ablations", 150 * 32 * 1024, 1),
    ),
    "quick": ("the smallest of everything, on a CPU", _quick),
}


def runs(table: str) -> list[Run]:
    if table not in TABLES:
        raise ValueError(f"tfla: table is {table!r}; it must be {', '.join(TABLES)}")
    return list(TABLES[table][1]())
