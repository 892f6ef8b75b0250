"""Attention as in Llama: the Transformer's layer in place of the mLSTM."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.lm.config import ModelConfig
from tfla.lm.models.layers import Documents
from tfla.nn.linear import Linear, fused

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older than torch 2.10
    varlen_attn = None  # type: ignore[assignment]


# How this torch's varlen_attn is told to be causal: the argument has changed.
_CAUSAL: dict[str, Any] = {}
if varlen_attn is not None:
    _OLD = "is_causal" in inspect.signature(varlen_attn).parameters
    _CAUSAL = {"is_causal": True} if _OLD else {"window_size": (-1, 0)}


def rotations(tokens: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (T,1,size/2) of the rotary embedding, in float32."""
    frequencies = base ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    angles = torch.arange(tokens, device=like.device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x (B,T,H,size), its halves taken as the two coordinates."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def attention_mask(starts: Tensor) -> Tensor:
    """(B,1,T,T): a token sees those before it in its own document."""
    document = starts.cumsum(1)
    tokens = starts.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=starts.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal)[:, None]


def has_packed_kernel(x: Tensor) -> bool:
    """Whether documents can be kept apart by cu_seqlens rather than by a mask."""
    return varlen_attn is not None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.fuse = config.heads, config.fuse
        self.q, self.k, self.v, self.out = (Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents | None = None) -> Tensor:
        projections = (self.q, self.k, self.v)
        q, k, v = fused(x, *projections) if self.fuse else (project(x) for project in projections)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        q, k = rotate(q, rotation), rotate(k, rotation)
        if documents is not None and documents.mask is None:
            longest = x.shape[1]  # an upper bound, which is all the kernel needs
            cu_seqlens = documents.cu_seqlens
            assert cu_seqlens is not None
            y = varlen_attn(
                q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, cu_seqlens, longest, longest, **_CAUSAL
            )
            assert isinstance(y, Tensor)
            return self.out(y.view(x.shape))
        mask = None if documents is None else documents.mask
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(-2))
