"""A model that tfla.lm does not have, all of it in one file: its mixer is a moving average of projected tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from tfla.lm.fields import Range, option
from tfla.lm.models.base import Kind, ModelConfig, kind_named
from tfla.nn import Linear


@dataclass(frozen=True)
class AverageConfig(ModelConfig):
    kind: str = kind_named("average")
    decay: Annotated[float, Range(at_least=0, below=1)] = option("what a token leaves of the average before it", 0.75)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise ValueError(f"tfla: dim is {self.dim}; an average has an even one")


class AverageState(NamedTuple):
    average: Tensor  # (N,dim)

    def clone(self) -> AverageState:
        return AverageState(self.average.clone())

    def copy_(self, other: AverageState) -> AverageState:
        self.average.copy_(other.average)
        return self

    def to(self, device: str) -> AverageState:
        return AverageState(self.average.to(device))


class Average(nn.Module):
    def __init__(self, config: AverageConfig) -> None:
        super().__init__()
        self.decay = config.decay
        self.value, self.out = (Linear(config.dim, config.dim, bias=False) for _ in range(2))

    def new_state(self, sequences: int) -> AverageState:
        return AverageState(self.value.weight.new_zeros(sequences, self.value.out_features))

    def scan(self, v: Tensor, average: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows = []
        for t in range(v.shape[1]):
            if starts is not None:
                average = average.masked_fill(starts[:, t, None], 0.0)
            average = self.decay * average + (1 - self.decay) * v[:, t]
            rows.append(average)
        return torch.stack(rows, dim=1), average

    def forward(
        self, x: Tensor, state: AverageState | None = None, *, mode: str = "train", starts: Tensor | None = None,
        cu_seqlens: Tensor | None = None, slots: Tensor | None = None,
    ) -> Any:  # fmt: skip
        v = self.value(x)
        if mode == "decode":
            assert state is not None and slots is None
            state.average.mul_(self.decay).add_((1 - self.decay) * v)
            return self.out(state.average)
        if mode == "train":
            return self.out(self.scan(v, torch.zeros_like(v[:, 0]), starts)[0])
        assert cu_seqlens is not None
        bounds = cu_seqlens.tolist()
        before = (state or self.new_state(len(bounds) - 1)).average
        parts = [
            self.scan(v[:, a:b], before[n : n + 1]) for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]
        after = AverageState(torch.cat([last for _, last in parts]))
        return self.out(torch.cat([h for h, _ in parts], dim=1)), after


class Averages(Kind[AverageConfig]):
    config = AverageConfig
    sizes = {"tiny": {"heads": 1}}
    decodes = True

    def mixer(self, config: AverageConfig) -> Average:
        return Average(config)

    def reads(self, mixer: Average) -> tuple[nn.Module, ...]:
        return (mixer.value,)

    def writes(self, mixer: Average) -> tuple[nn.Module, ...]:
        return (mixer.out,)

    def arrange(self, config, tokens, documents, dtype, group):
        return tokens, {} if documents is None else {"starts": documents.starts}

    def work(self, config: AverageConfig, context: int) -> tuple[float, float]:
        return 2 * config.dim**2, 3 * config.dim
