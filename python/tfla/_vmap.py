"""torch.vmap over the operators: the new axis becomes part of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla._autograd import TENSORS


def _fold(x: Tensor | None, axis: int | None, size: int) -> Tensor | None:
    """(V,B,...) -> (V*B,...), with V repeated where x does not have it."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
    return x.flatten(0, 1)


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (size, -1))


def _register(name: str, tensors: int) -> None:
    operator = getattr(torch.ops.tfla, name).default

    def rule(info: Any, in_dims: tuple, *inputs: Any) -> Any:
        missing = (None,) * (tensors - len(inputs))  # at their defaults
        inputs, in_dims = (*inputs, *missing), (*in_dims, *missing)
        size, cu_seqlens = info.batch_size, inputs[tensors - 1]
        if cu_seqlens is not None:
            raise ValueError(
                "tfla: cu_seqlens is given under vmap; packed sequences lie in a batch of 1, so pack them all"
            )
        folded = [_fold(x, axis, size) for x, axis in zip(inputs[:tensors], in_dims[:tensors], strict=True)]
        output = operator(*folded, *inputs[tensors:])
        if isinstance(output, Tensor):
            return _unfold(output, size), 0
        # A gradient of a state that was not given is empty, and stays one for all.
        return (
            tuple(x if x.numel() == 0 and x.dim() == 1 else _unfold(x, size) for x in output),
            tuple(None if x.numel() == 0 and x.dim() == 1 else 0 for x in output),
        )

    torch.library.register_vmap(f"tfla::{name}", rule)


_register("mlstm", TENSORS)
_register("mlstm_with_state", TENSORS)
_register("mlstm_backward", TENSORS + 4)
