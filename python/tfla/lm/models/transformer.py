"""The Transformer as in Llama, a baseline for training: rotary embedding, PyTorch's attention, SwiGLU; no decoding."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.lm.fields import Positive, option
from tfla.lm.models.base import Kind, ModelConfig, kind_named
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


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    kind: str = kind_named("transformer")
    rope_base: Positive = option("of the rotary embedding", 10000.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"tfla: heads is {self.heads} for dim {self.dim}; heads of a Transformer have an even size"
            )


def rotations(tokens: int, size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (T,1,size/2) of the rotary embedding, in float32."""
    frequencies = base ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequencies
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


def has_packed_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether documents can be kept apart by cu_seqlens rather than by a mask."""
    return varlen_attn is not None and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
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


class Transformer(Kind[TransformerConfig]):
    config = TransformerConfig
    sizes = {
        "tiny": {"heads": 2},
        "160m": {"heads": 12},
        "400m": {"heads": 16},
        "1.4b": {"heads": 16},
        "7b": {"heads": 32},
    }
    variants = {"transformer": {}}

    def mixer(self, config: TransformerConfig) -> Attention:
        return Attention(config)

    def reads(self, mixer: Attention) -> tuple[nn.Module, ...]:
        return mixer.q, mixer.k, mixer.v

    def writes(self, mixer: Attention) -> tuple[nn.Module, ...]:
        return (mixer.out,)

    def arrange(
        self, config: TransformerConfig, tokens: Tensor, documents: Documents | None, dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        """Positions, once for all layers, and a mask where no kernel takes packed documents."""
        if documents is not None and (documents.cu_seqlens is None or not has_packed_kernel(tokens.device, dtype)):
            documents = documents._replace(mask=attention_mask(documents.starts))
        size = config.dim // config.heads
        rotation = rotations(tokens.shape[1], size, config.rope_base, tokens.device)
        return tokens, {"rotation": rotation, "documents": documents}

    def work(self, config: TransformerConfig, context: int) -> tuple[float, float]:
        """The causal half of attention."""
        return 4 * config.dim * config.dim, 2 * context * config.dim
