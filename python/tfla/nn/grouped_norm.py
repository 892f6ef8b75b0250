"""The gated RMS norm of Mamba-2's layer, over groups of channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def grouped_rms_norm(
    x: Tensor, weight: Tensor, z: Tensor | None, eps: float, groups: int, norm_before_gate: bool
) -> Tensor:
    """norm(x silu(z)), or with norm_before_gate norm(x) silu(z), in the dtype of x; the norm is of each of the groups
    that the last axis is cut into."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide)
    gate = None if z is None else F.silu(z.to(wide))
    if gate is not None and not norm_before_gate:
        y = y * gate
    parts = y.unflatten(-1, (groups, -1))
    y = F.rms_norm(parts, parts.shape[-1:], eps=eps).flatten(-2) * weight.to(wide)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


class GroupedRMSNorm(nn.Module):
    """x (..., dim), z the same -> the same, as `grouped_rms_norm`."""

    def __init__(self, dim: int, groups: int, eps: float, norm_before_gate: bool, **factory: Any) -> None:
        super().__init__()
        self.groups, self.eps, self.norm_before_gate = groups, eps, norm_before_gate
        self.weight = nn.Parameter(torch.empty(dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return grouped_rms_norm(x, self.weight, z, self.eps, self.groups, self.norm_before_gate)
