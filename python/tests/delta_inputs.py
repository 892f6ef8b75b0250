"""Random arguments of the delta rule, by their names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PER_TOKEN = ("q", "k", "v", "beta", "g")  # what layouts, chunks and packing apply to
Given = dict[str, Tensor]


def make_delta(
    batch: int = 2,
    tokens: int = 37,
    heads: int = 4,
    dqk: int = 8,
    dhv: int = 12,
    *,
    qk_heads: int | None = 2,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    g: bool = True,
    A_log: bool = False,
    dt_bias: bool = False,
    raw_beta: bool = False,
    seed: int = 0,
) -> Given:
    """Keys of about length 1, as the models have them. g, A_log, dt_bias: whether there is one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    qk_heads = qk_heads or heads
    given = {
        "q": normal(batch, tokens, qk_heads, dqk),
        "k": torch.nn.functional.normalize(normal(batch, tokens, qk_heads, dqk), dim=-1),
        "v": normal(batch, tokens, heads, dhv),
        "beta": normal(batch, tokens, heads),
        "g": normal(batch, tokens, heads),
        "A_log": normal(heads) / 2 - 2,
        "dt_bias": normal(heads),
    }
    if not raw_beta:
        given["beta"] = torch.sigmoid(given["beta"])
    if not A_log:
        given["g"] = -torch.exp(given["g"] - 2)
    wanted = {"g": g or A_log, "A_log": A_log, "dt_bias": dt_bias}
    return {
        name: x.to(dtype if name in "qkv" else gate_dtype or dtype)
        for name, x in given.items()
        if wanted.get(name, True)
    }


def make_delta_state(sequences: int = 2, heads: int = 4, dqk: int = 8, dhv: int = 12, dtype=torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(sequences, heads, dqk, dhv, generator=generator, dtype=torch.float64).to(dtype)


def mapped(function: Callable[[Tensor], Tensor], given: Given) -> Given:
    """With the function applied to all that has an axis of tokens."""
    return {name: function(x) if name in PER_TOKEN else x for name, x in given.items()}


def leaves(given: Given, dtype: torch.dtype | None = None) -> Given:
    """Copies that ask for gradients, with the same strides."""
    return {
        name: x.detach().to(dtype or x.dtype).clone(memory_format=torch.preserve_format).requires_grad_()
        for name, x in given.items()
    }


def head_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)
