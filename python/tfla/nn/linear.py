"""Linear layers whose parameters may be kept in a wider dtype than they compute in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """Computes in the dtype of its input: with float32 parameters and a bfloat16 input, master weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def unchanged(kind: type[nn.Module], *layers: nn.Module) -> bool:
    """Whether layers may be left out for their weights: none was replaced, by an adapter say, or has hooks, or was
    given another forward."""
    return all(
        type(x) is kind and not x._forward_hooks and not x._forward_pre_hooks and "forward" not in vars(x)
        for x in layers
    )


def fused(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """What several layers make of x, their biases left out, by one product: x is read once, forward and backward."""
    weights = [layer.weight for layer in layers]
    return F.linear(x, torch.cat(weights).to(x.dtype)).split([weight.shape[0] for weight in weights], dim=-1)
