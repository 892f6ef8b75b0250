"""Times the causal convolution with SiLU through PyTorch on this GPU: tfla.causal_conv1d and tfla.causal_conv1d_step,
beside the package causal_conv1d and PyTorch's conv1d. Writes conv_gpu.{json,md}.

A peer that is absent, fails or is wrong is shown with the reason. The package causal_conv1d needs its CUDA extension:
it is timed where it is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators import beside
from benchmarks.operators.goals import AHEAD, Goal
from benchmarks.operators.problem import STATE, Call, Given, Problem

EXAMPLES = """examples:
  python -m benchmarks.operators.conv --out results                        everything
  python -m benchmarks.operators.conv --out results --only training --rounds 1
  python -m benchmarks.operators.conv --out results --page                 the page anew from the JSON file; no GPU
"""
PACKAGE, PYTORCH = "causal_conv1d", "PyTorch"
WIDTH = 4


@dataclass(frozen=True)
class Convolution(Problem):
    operation: str
    channels: int
    side_by_side: str = "channels"  # or tokens: what lies so in memory
    batch: int = 4
    tokens: int = 8192

    sides = ("tfla", PACKAGE, PYTORCH)
    axes: ClassVar[dict[str, str]] = {"x": "BTD", "weight": "DW", "bias": "D", "y": "BTD", STATE: "BWD"}

    def __str__(self) -> str:
        if self.operation == "step":
            return f"step, {self.batch} x 1 token, {self.channels:,} channels"
        size = f"{self.batch} x {self.tokens:,}, {self.channels:,} channels"
        return f"{self.operation}, {size}, {self.side_by_side} side by side"

    def draw(self, device: str) -> Given:
        numbers = torch.Generator(device).manual_seed(1)
        rows = (self.batch,) if self.operation == "step" else (self.batch, self.tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=numbers, device=device).bfloat16()

        x = normal(*rows, self.channels)
        if self.operation != "step" and self.side_by_side == "tokens":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        given = {"x": x, "weight": normal(self.channels, WIDTH) / 2, "bias": normal(self.channels)}
        if self.operation == "step":
            given[STATE] = normal(self.batch, WIDTH - 1, self.channels)
        return given

    def narrow(self) -> dict[str, int]:
        return {"D": 64}

    def first_state(self, given: Given) -> Tensor:
        x = given["x"]
        return x.new_zeros(x.shape[0], WIDTH - 1, x.shape[2])

    def token(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([state, given["x"][:, None]], dim=1)
        return F.silu(given["bias"] + (inputs * given["weight"].T).sum(1)), inputs[:, 1:]

    def side(self, name: str, given: Given) -> Call:
        return self._step(name, given) if self.operation == "step" else self._sequence(name, given)

    def _sequence(self, name: str, given: Given) -> Call:
        x, weight, bias = given["x"], given["weight"], given["bias"]
        if name == "tfla":
            import tfla

            return lambda: tfla.causal_conv1d(x, weight, bias, activation="silu")
        if name == PACKAGE:
            from causal_conv1d import causal_conv1d_fn

            return lambda: causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)

        def by_pytorch() -> Tensor:
            y = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=WIDTH - 1, groups=self.channels)
            return F.silu(y[:, :, : self.tokens]).transpose(1, 2)

        return by_pytorch

    def _step(self, name: str, given: Given) -> Call:
        x, weight, bias, state = given["x"], given["weight"], given["bias"], given[STATE]
        if name == "tfla":
            import tfla

            return lambda: tfla.causal_conv1d_step(x, state, weight, bias, activation="silu")
        if name == PACKAGE:
            from causal_conv1d import causal_conv1d_update

            return lambda: causal_conv1d_update(x, state.transpose(1, 2), weight, bias, activation="silu")

        def by_pytorch() -> Tensor:
            inputs = torch.cat([state, x[:, None]], dim=1)
            state.copy_(inputs[:, 1:])
            return F.silu(bias + (inputs * weight.T).sum(1))

        return by_pytorch


# ---------------------------------------------------------------- what is measured

SHAPES = ((5376, "channels"), (5376, "tokens"), (10_240, "channels"))  # of Mamba-2 with 80 heads, and with 128
FASTER = (Goal(AHEAD, 1.0),)


def cases() -> list[beside.Case]:
    found = []
    for channels, memory in SHAPES:
        forward = Convolution("forward", channels, memory)
        found += [beside.Case(replace(forward, operation=name), FASTER) for name in ("forward", "training")]
    for batch in (1, 128):
        found.append(beside.Case(Convolution("step", 5376, batch=batch), FASTER))
    return found


ABOUT = f"""`tfla.causal_conv1d` of width {WIDTH} with a bias and SiLU, and its step, beside `causal_conv1d_fn` and
`causal_conv1d_update` of the package causal_conv1d, and PyTorch's `F.conv1d` and `F.silu`."""

SUITE = beside.Suite("conv_gpu", "The causal convolution on a GPU", "benchmarks.operators.conv", ABOUT, cases)

if __name__ == "__main__":
    beside.main(SUITE, __doc__, EXAMPLES)
