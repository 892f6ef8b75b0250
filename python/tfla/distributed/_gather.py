"""What context parallel operators share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def refuse_state_elsewhere(initial_state: object, group: Any) -> None:
    if initial_state is not None and dist.get_rank(group) != 0:
        raise ValueError("tfla: initial_state is given on another rank than the first; it precedes the whole sequence")


def all_gather(tensors: Sequence[Tensor], group: Any) -> list[list[Tensor]]:
    """The same tensors of every rank, by one collective on their bytes."""
    sizes = [x.numel() * x.element_size() for x in tensors]
    room = [-(-size // 16) * 16 for size in sizes]  # so that each begins where its dtype may

    def parts(row: Tensor) -> list[Tensor]:
        slots = zip(row.split(room), sizes, tensors, strict=True)
        return [slot[:size].view(x.dtype).view(x.shape) for slot, size, x in slots]

    mine = torch.zeros(sum(room), dtype=torch.uint8, device=tensors[0].device)
    for slot, x in zip(parts(mine), tensors, strict=True):
        slot.copy_(x)
    gathered = mine.new_empty(dist.get_world_size(group) * mine.numel())
    _gather(gathered, mine, group=group)
    return [parts(row) for row in gathered.split(mine.numel())]
