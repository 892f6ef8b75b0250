"""The parts that models share. All compute in the dtype of their input, whatever their parameters'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn.linear import Linear, fused

if TYPE_CHECKING:
    from tfla.lm.models.base import ModelConfig


class Documents(NamedTuple):
    """Where documents begin in the rows of a batch."""

    starts: Tensor  # (B,T) bool: first tokens; set at the beginning of every row that does not go on an earlier one
    cu_seqlens: Tensor | None = None  # (N+1) int32 over the B*T tokens of all rows; may repeat its last entry
    mask: Tensor | None = None  # (B,1,T,T) bool, who may attend whom; made by models that need one


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


class Block(nn.Module):
    """x + mix(norm(x)), then x + ffn(norm(x)). What a sequence layer needs besides x is passed on to it."""

    def __init__(self, config: ModelConfig, mixer: nn.Module) -> None:
        super().__init__()
        self.norm_mix, self.norm_ffn = (RMSNorm(config.dim, config.norm_eps) for _ in range(2))
        self.mix = mixer
        self.ffn = SwiGLU(config.dim, config.feed_forward, config.fuse)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed = self.mix(self.norm_mix(x), *args, **kwargs)
        mixed, *state = mixed if isinstance(mixed, tuple) else (mixed,)
        x = x + mixed
        x = x + self.ffn(self.norm_ffn(x))
        return (x, *state) if state else x


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
