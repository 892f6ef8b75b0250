"""torch.vmap over the operators: the new axis becomes part of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla._torch.operators import TENSORS


def fold(x: Tensor | None, axis: int | None, size: int, at: int = 0) -> Tensor | None:
    """Merges vmap's axis V into the axis `at`: (V,B,...) -> (V*B,...) for 0; V is repeated where x does not have it."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
    x = x.movedim(0, at).flatten(at, at + 1)
    # An axis of one folds without a copy, whatever the strides; the last axis is to be contiguous.
    return x if x.stride(-1) == 1 else x.contiguous()


def _unfold(x: Tensor, size: int, batch: int) -> Tensor:
    return x.unflatten(0, (size, batch))


def _batch_of(x: Tensor, axis: int | None) -> int:
    """B of a tensor whose axis `axis` is vmap's."""
    return x.shape[1 if axis == 0 else 0]


def refuse_packed(cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        raise ValueError("tfla: cu_seqlens is given under vmap; packed sequences lie in a batch of 1, so pack them all")


def refuse_shared(slots: Tensor | None, axes: tuple) -> None:
    """axes: vmap's of the parts of a state."""
    if slots is not None:
        raise ValueError("tfla: slots is given under vmap; they belong to one call, so make it without vmap")
    if None in axes:
        raise ValueError(
            "tfla: the state is not batched by vmap; each call updates one of its own, so give it that axis"
        )


def _register(name: str, tensors: int, first: int = 0) -> None:
    """tensors: how many arguments are; first: which of them is the first that forward takes."""
    operator = getattr(torch.ops.tfla, name).default

    def rule(info: Any, in_dims: tuple, *inputs: Any) -> Any:
        missing = (None,) * (tensors - len(inputs))  # at their defaults
        inputs, in_dims = (*inputs, *missing), (*in_dims, *missing)
        size, cu_seqlens = info.batch_size, inputs[tensors - 1]
        refuse_packed(cu_seqlens)
        folded = [fold(x, axis, size) for x, axis in zip(inputs[:tensors], in_dims[:tensors], strict=True)]
        output = operator(*folded, *inputs[tensors:])
        batch = _batch_of(inputs[first], in_dims[first])
        if isinstance(output, Tensor):
            return _unfold(output, size, batch), 0
        # A gradient of a state that was not given is empty, and stays one for all.
        return (
            tuple(x if x.numel() == 0 and x.dim() == 1 else _unfold(x, size, batch) for x in output),
            tuple(None if x.numel() == 0 and x.dim() == 1 else 0 for x in output),
        )

    torch.library.register_vmap(f"tfla::{name}", rule)


_register("mlstm", TENSORS)
_register("mlstm_with_state", TENSORS)
_register("mlstm_backward", TENSORS + 4, first=4)


def _step(info: Any, in_dims: tuple, *inputs: Any) -> Any:
    size, (C, n, m) = info.batch_size, inputs[5:8]
    refuse_shared(inputs[8] if len(inputs) > 8 else None, in_dims[5:8])
    state = [x.movedim(axis, 0) for x, axis in zip((C, n, m), in_dims[5:8], strict=True)]
    # A copy where the axes do not lie one behind the other.
    folded = [x.flatten(0, 1) for x in state]
    tokens = [fold(x, axis, size) for x, axis in zip(inputs[:5], in_dims[:5], strict=True)]
    h = torch.ops.tfla.mlstm_step.default(*tokens, *folded, None, *inputs[9:])
    for x, y in zip(state, folded, strict=True):
        if x.data_ptr() != y.data_ptr():
            x.copy_(_unfold(y, size, x.shape[1]))
    return _unfold(h, size, _batch_of(inputs[0], in_dims[0])), 0


torch.library.register_vmap("tfla::mlstm_step", _step)
