"""Initial weights: small init for what reads the residual stream, Wang init for what writes to it (appendix E.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from tfla.lm.model import LanguageModel


def small(dim: int) -> float:
    return (2 / (5 * dim)) ** 0.5


def wang(dim: int, layers: int) -> float:
    return 2 / (layers * dim**0.5)


def normal(*modules: nn.Module, std: float) -> None:
    for module in modules:
        nn.init.normal_(module.weight, std=std)  # type: ignore[arg-type]


@torch.no_grad()
def initialize(model: LanguageModel) -> None:
    """Norms have set themselves to ones, as has whatever a kind leaves as it was made."""
    config, kind = model.config, model.kind
    reads, writes = small(config.dim), wang(config.dim, config.layers)
    normal(model.embedding, model.head, std=reads)
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        normal(*kind.reads(block.mix), block.ffn.gate, block.ffn.up, std=reads)
        normal(*kind.writes(block.mix), block.ffn.down, std=writes)
        kind.initialize(block.mix, config, reads)
