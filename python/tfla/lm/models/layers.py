"""The parts that xLSTM and Transformer share. All compute in the dtype of their input, whatever their parameters'."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn.linear import Linear, fused


class Documents(NamedTuple):
    """Where documents begin in the rows of a batch."""

    starts: Tensor  # (B,T) bool: first tokens; set at the beginning of every row that does not go on an earlier one
    cu_seqlens: Tensor | None = None  # (N+1) int32 over the B*T tokens of all rows; may repeat its last entry
    mask: Tensor | None = None  # (B,1,T,T) bool, who may attend whom; made by the Transformer where it needs one


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # Statistics are taken in float32 inside.
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight.to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int, fuse: bool) -> None:
        super().__init__()
        self.fuse = fuse
        self.gate, self.up = Linear(dim, hidden, bias=False), Linear(dim, hidden, bias=False)
        self.down = Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = fused(x, self.gate, self.up) if self.fuse else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
