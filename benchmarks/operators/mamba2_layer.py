"""The layer of Mamba-2 as ssd.py times it: tfla.nn.Mamba2 and mamba_ssm's, on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators.packages import mamba_ssm
from benchmarks.operators.problem import Call, Given, Problem

WIDTH, EPSILON = 4, 1e-5


@dataclass(frozen=True)
class Layer(Problem):
    operation: str = "training"
    d_model: int = 2560
    state: int = 128
    head_dim: int = 64
    batch: int = 4
    tokens: int = 8192

    sides = ("tfla", "mamba_ssm")
    ends_too = False  # its reference has no state to begin with
    axes: ClassVar[dict[str, str]] = {
        "x": "BTD", "y": "BTD", "in_proj.weight": "ED", "conv1d.weight": "CSW", "conv1d.bias": "C", "dt_bias": "H",
        "A_log": "H", "D": "H", "norm.weight": "I", "out_proj.weight": "DI",
    }  # fmt: skip

    def __str__(self) -> str:
        inner = f"{self.heads} heads of {self.head_dim}, state {self.state}"
        return f"{self.operation}, {self.batch} x {self.tokens:,}, the layer Mamba2 of width {self.d_model:,}: {inner}"

    @property
    def inner(self) -> int:
        return 2 * self.d_model

    @property
    def heads(self) -> int:
        return self.inner // self.head_dim

    def draw(self, device: str) -> Given:
        numbers = torch.Generator(device).manual_seed(1)

        def normal(*shape: int, over: int = 1, dtype: torch.dtype = self.dtype) -> Tensor:
            return (torch.randn(*shape, generator=numbers, device=device) * over**-0.5).to(dtype)

        channels = self.inner + 2 * self.state
        rate, bias = torch.rand(2, self.heads, generator=numbers, device=device)
        weights = {
            "in_proj.weight": normal(self.inner + channels + self.heads, self.d_model, over=self.d_model),
            "conv1d.weight": normal(channels, 1, WIDTH, over=WIDTH), "conv1d.bias": normal(channels, over=WIDTH),
            "dt_bias": -3 - 3 * bias, "A_log": torch.log(1 + 15 * rate),
            "D": 1 + normal(self.heads, over=16, dtype=torch.float32), "norm.weight": 1 + normal(self.inner, over=16),
            "out_proj.weight": normal(self.d_model, self.inner, over=self.inner),
        }  # fmt: skip
        parameters = {name: torch.nn.Parameter(x) for name, x in weights.items()}
        return {"x": normal(self.batch, self.tokens, self.d_model)} | parameters

    def narrow(self) -> dict[str, int]:
        return {}

    def first_state(self, given: Given) -> Tensor:
        x = given["x"]
        return x.new_zeros(x.shape[0], self.heads, self.head_dim, self.state)

    def token(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        """Of the scan alone, on what the convolution makes."""
        dt = F.softplus(given["dt"] + given["dt_bias"])
        decay = torch.exp(-dt * torch.exp(given["A_log"]))[..., None, None]
        state = decay * state + (dt[..., None] * given["x"])[..., None] * given["B"][:, None, None]
        return (state * given["C"][:, None, None]).sum(-1) + given["D"][:, None] * given["x"], state

    def reference(self, given: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, tokens, _ = given["x"].shape
        made = given["x"] @ given["in_proj.weight"].T
        z, inputs, dt = made.split([self.inner, self.inner + 2 * self.state, self.heads], dim=-1)
        before = F.pad(inputs, (0, 0, WIDTH - 1, 0))
        taps = given["conv1d.weight"][:, 0]
        inputs = F.silu(given["conv1d.bias"] + sum(before[:, w : w + tokens] * taps[:, w] for w in range(WIDTH)))
        x, B, C = inputs.split([self.inner, self.state, self.state], dim=-1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        state, rows = self.first_state(given), []
        for t in range(tokens):
            at = {"x": x[:, t], "B": B[:, t], "C": C[:, t], "dt": dt[:, t]}
            y, state = self.token(given | at, state)
            rows.append(y.reshape(batch, self.inner))
        y = torch.stack(rows, 1) * F.silu(z)
        y = given["norm.weight"] * y / torch.sqrt((y * y).mean(-1, keepdim=True) + EPSILON)
        return y @ given["out_proj.weight"].T, state

    def side(self, name: str, given: Given) -> Call:
        sizes = {"d_model": self.d_model, "d_state": self.state, "headdim": self.head_dim, "device": "meta"}
        if name == "tfla":
            import tfla.nn

            layer: Any = tfla.nn.Mamba2(**sizes)
        else:
            module = mamba_ssm("modules.mamba2")
            layer = module.Mamba2(**sizes, use_mem_eff_path=module.causal_conv1d_fn is not None)
        weights = {name: x for name, x in given.items() if name != "x"}
        layer.load_state_dict(weights, assign=True)  # the very parameters, so that gradients are theirs
        return lambda: layer(given["x"])
