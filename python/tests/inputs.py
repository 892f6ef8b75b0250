"""Random arguments of the operators, in the regimes of docs/numerics.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Inputs:
    q: Tensor  # (B,T,Hqk,dqk)
    k: Tensor  # (B,T,Hqk,dqk)
    v: Tensor  # (B,T,H,dhv)
    i: Tensor  # (B,T,H)
    f: Tensor  # (B,T,H)

    def __iter__(self):
        return iter((self.q, self.k, self.v, self.i, self.f))

    def map(self, function) -> Inputs:
        return Inputs(*(function(x) for x in self))

    def leaves(self) -> Inputs:
        """Copies that ask for gradients, with the same strides."""
        return self.map(lambda x: x.detach().clone(memory_format=torch.preserve_format).requires_grad_())


def make_inputs(
    batch: int = 2,
    tokens: int = 37,
    heads: int = 2,
    dqk: int = 8,
    dhv: int = 12,
    *,
    qk_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    qk_heads = qk_heads or heads
    gates = gate_dtype or dtype
    bias = torch.linspace(3.0, 6.0, heads, dtype=torch.float64)
    return Inputs(
        normal(batch, tokens, qk_heads, dqk).to(dtype),
        normal(batch, tokens, qk_heads, dqk).to(dtype),
        normal(batch, tokens, heads, dhv).to(dtype),
        (normal(batch, tokens, heads) * 2 - 2).to(gates),
        (normal(batch, tokens, heads) + bias).to(gates),
    )


def make_state(sequences: int, heads: int, dqk: int, dhv: int, dtype: torch.dtype = torch.float32, *, m: float = 0.3):
    generator = torch.Generator().manual_seed(7)
    C = torch.randn(sequences, heads, dqk, dhv, generator=generator, dtype=torch.float64)
    n = torch.randn(sequences, heads, dqk, generator=generator, dtype=torch.float64)
    return C.to(dtype), n.to(dtype), torch.full((sequences, heads), m, dtype=dtype)
