"""Gates of the families of `tfla._options` in PyTorch, for what computes with them outside of the operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla._options import GateFamily

_LOG = {"itself": lambda x: x, "log_sigmoid": F.logsigmoid}


def soft_capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def log_input(family: GateFamily, i: Tensor, soft_cap: float | None) -> Tensor:
    return _LOG[family.log_input](soft_capped(i, soft_cap))


def log_forget(family: GateFamily, f: Tensor, soft_cap: float | None) -> Tensor:
    return _LOG[family.log_forget](soft_capped(f, soft_cap))
