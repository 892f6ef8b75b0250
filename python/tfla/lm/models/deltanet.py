"""Gated DeltaNet, and DeltaNet without its decay: blocks of layers of the delta rule, on the CPU as the operator is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tfla.lm.fields import Count, NotNegative, Range, option
from tfla.lm.models.base import Kind, ModelConfig, Width, kind_named
from tfla.lm.models.init import normal
from tfla.lm.models.layers import Documents
from tfla.nn import GatedDeltaNet

Factor = Annotated[float, Range(above=0, at_most=64)]


@dataclass(frozen=True)
class DeltaNetConfig(ModelConfig):
    kind: str = kind_named("deltanet")
    head_dim: Width | None = option("of queries and keys; none: 3/4 of dim for all heads", None)
    expand_v: Factor = option("head dimension of values, as a multiple of head_dim", 2.0)
    v_heads: Width | None = option("of values, which share queries and keys; none: as many as heads", None)
    use_decay: bool = option("the gated delta rule, or the one that forgets nothing", True)
    allow_neg_eigval: bool = option("write strengths up to 2, not 1", False)
    use_gate: bool = option("output gate", True)
    conv_size: Annotated[int, Range(at_least=1, at_most=64)] = option("tokens of the convolution of q, k and v", 4)
    cell_norm_eps: NotNegative = option("of the norm per head after the delta rule", 1e-5)
    chunk_size: Count | None = option("of the kernels; none: the plan's choice", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and 3 * self.dim % (4 * self.heads):
            raise ValueError(
                f"tfla: heads is {self.heads} for dim {self.dim}; it must divide 3/4 of dim, or give head_dim"
            )
        if self.values % self.heads:
            raise ValueError(f"tfla: v_heads is {self.v_heads}; it must be a multiple of heads, {self.heads}")
        if (self.keys * self.expand_v) % 1:
            raise ValueError(f"tfla: expand_v is {self.expand_v}; times head_dim {self.keys} it must be a whole number")

    @property
    def keys(self) -> int:
        """Dimension of a head of queries and keys."""
        return 3 * self.dim // (4 * self.heads) if self.head_dim is None else self.head_dim

    @property
    def values(self) -> int:
        """Heads of values."""
        return self.heads if self.v_heads is None else self.v_heads


class DeltaNet(Kind[DeltaNetConfig]):
    config = DeltaNetConfig
    # Heads of 128 or 256, as published for a width of 2048; for 160m heads of 96.
    sizes = {"400m": {"heads": 6}, "1.4b": {"heads": 6}, "7b": {"heads": 12}}
    variants = {"deltanet": {}}
    decodes = True
    runs_on_cuda = False

    def mixer(self, config: DeltaNetConfig) -> GatedDeltaNet:
        return GatedDeltaNet(
            config.dim, config.heads, config.keys, expand_v=config.expand_v, num_v_heads=config.values,
            use_gate=config.use_gate, use_decay=config.use_decay, allow_neg_eigval=config.allow_neg_eigval,
            conv_size=config.conv_size, norm_eps=config.cell_norm_eps, chunk_size=config.chunk_size, fuse=config.fuse,
        )  # fmt: skip

    def reads(self, mixer: GatedDeltaNet) -> tuple[nn.Module, ...]:
        return mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.b_proj

    def writes(self, mixer: GatedDeltaNet) -> tuple[nn.Module, ...]:
        return (mixer.o_proj,)

    def initialize(self, mixer: GatedDeltaNet, config: DeltaNetConfig, std: float) -> None:
        """Decays, convolutions and norm have set themselves."""
        for name in ("a_proj",) * config.use_decay + ("g_proj",) * config.use_gate:
            normal(getattr(mixer, name), std=std)

    def arrange(
        self, config: DeltaNetConfig, tokens: Tensor, documents: Documents | None, dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        """Rows end to end as packed sequences where boundaries are known, else with the first tokens of documents."""
        if documents is None:
            return tokens, {}
        if documents.cu_seqlens is not None:
            return tokens.reshape(1, -1), {"cu_seqlens": documents.cu_seqlens}
        return tokens, {"starts": documents.starts}

    def work(self, config: DeltaNetConfig, context: int) -> tuple[float, float]:
        """C^T k, k r^T and C^T q of the recurrence, whatever more a chunkwise kernel does, and the convolutions."""
        size = round(config.keys * config.expand_v)
        qk, v = config.heads * config.keys, config.values * size
        weights = config.dim * (2 * qk + (2 + config.use_gate) * v + (1 + config.use_decay) * config.values)
        return weights, 6 * config.values * config.keys * size + 2 * config.conv_size * (2 * qk + v)
