"""The causal convolution by its formula: a loop over taps and channels side by side, differentiable, in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = False, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, last state) of x (B,T,D), weight (D,W), state (B,W-1,D)."""
    reach = weight.shape[1] - 1
    before = x.new_zeros(x.shape[0], reach, x.shape[2]) if state is None else state
    padded, tokens = torch.cat([before, x], dim=1), x.shape[1]
    y = sum(padded[:, w : w + tokens] * weight[:, w] for w in range(reach + 1))
    y = y if bias is None else y + bias
    return (y / (1 + torch.exp(-y)) if silu else y), padded[:, tokens:]


def conv_by_parts(x: Tensor, bounds: list[int], *args, state: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
    """The same of sequences packed into one row; behind the last of them are zeros."""
    parts = [
        conv_reference(x[:, a:b], *args, state=None if state is None else state[n : n + 1], **options)
        for n, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
    ]
    rest = x.new_zeros(1, x.shape[1] - bounds[-1], x.shape[2])
    return torch.cat([*(y for y, _ in parts), rest], dim=1), torch.cat([last for _, last in parts])
