"""Initial weights: small init for what reads the residual stream, Wang init for what writes to it (appendix E.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tfla.nn import MLSTMLayer

if TYPE_CHECKING:
    from tfla.lm.model import LanguageModel


def small(dim: int) -> float:
    return (2 / (5 * dim)) ** 0.5


def wang(dim: int, layers: int) -> float:
    return 2 / (layers * dim**0.5)


@torch.no_grad()
def initialize(model: LanguageModel) -> None:
    """Gates and norms have set themselves: weights 0 and the config's biases; ones."""
    config = model.config
    reads, writes = small(config.dim), wang(config.dim, config.layers)

    def normal(*modules: nn.Module, std: float) -> None:
        for module in modules:
            nn.init.normal_(module.weight, std=std)  # type: ignore[arg-type]

    normal(model.embedding, model.head, std=reads)
    for block in model.blocks:
        mix, ffn = block.mix, block.ffn
        normal(mix.q, mix.k, mix.v, ffn.gate, ffn.up, std=reads)  # type: ignore[union-attr, arg-type]
        normal(mix.out, ffn.down, std=writes)  # type: ignore[union-attr, arg-type]
        if isinstance(mix, MLSTMLayer):
            if config.zero_output_gate:
                nn.init.zeros_(mix.output_gate.weight)
            else:
                normal(mix.output_gate, std=reads)
