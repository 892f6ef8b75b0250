"""What torch.autocast does to the operators."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast q, k, v take its dtype, as operands of matrix products do; gates and states keep theirs."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)
