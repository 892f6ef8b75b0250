"""Fake kernels: the shapes, dtypes and devices of what the operators return, for torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla import info
from tfla._torch import operators  # noqa: F401  (defines what is registered for)


def _on_one_device(*tensors: Tensor | None) -> None:
    devices = {x.device for x in tensors if x is not None}
    if len(devices) > 1:
        raise ValueError(f"tfla: tensors are on {', '.join(sorted(map(str, devices)))}; all must be on one device")


def _state_shapes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, head_first: bool) -> list[tuple[int, ...]]:
    states = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (states, v.shape[1 if head_first else 2], q.shape[3], v.shape[3])
    return [shape, shape[:3], shape[:2]]


# Arguments at their defaults are left out at the end.
@torch.library.register_fake("tfla::mlstm")
@torch.library.register_fake("tfla::_mlstm")
def _(q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, *options):
    _on_one_device(q, k, v, i, f, C, n, m, cu_seqlens)
    return v.new_empty(v.shape)


def _denominator_bytes(q: Tensor, i: Tensor) -> int:
    """What the plan calls saved_bytes where denominators are kept: two vectors of a number per token and head, each
    on a boundary of its own; none on the CPU. In Python, since sizes may be symbols."""
    if not q.is_cuda:
        return 0
    boundary = info.scratch_alignment()
    vector = i.shape.numel() * (8 if q.dtype == torch.float64 else 4)
    return 2 * ((vector + boundary - 1) // boundary * boundary)


@torch.library.register_fake("tfla::mlstm_with_denominators")
@torch.library.register_fake("tfla::_mlstm_with_denominators")
def _(q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, *options):
    _on_one_device(q, k, v, i, f, C, n, m, cu_seqlens)
    return v.new_empty(v.shape), v.new_empty(_denominator_bytes(q, i), dtype=torch.uint8)


@torch.library.register_fake("tfla::mlstm_with_state")
def _(q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, gate=0, normalizer=0, head_first=False, *options):
    _on_one_device(q, k, v, i, f, C, n, m, cu_seqlens)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shapes = _state_shapes(q, v, cu_seqlens, head_first)
    return (v.new_empty(v.shape), *(q.new_empty(shape, dtype=dtype) for shape in shapes))


@torch.library.register_fake("tfla::mlstm_backward")
def _(dh, dC, dn, denominators, q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, *options):
    _on_one_device(dh, dC, dn, denominators, q, k, v, i, f, C, n, m, cu_seqlens)
    grads = [x.new_empty(x.shape) for x in (q, k, v, i, f)]
    states = [q.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape) for x in (C, n)]
    return (*grads, *states)


@torch.library.register_fake("tfla::_mlstm_backward")
def _(dh, denominators, q, k, v, i, f):
    _on_one_device(dh, denominators, q, k, v, i, f)
    return tuple(x.new_empty(x.shape) for x in (q, k, v, i, f))


@torch.library.register_fake("tfla::mlstm_step")
@torch.library.register_fake("tfla::_mlstm_step")
def _(q, k, v, i, f, C, n, m, slots=None, *options):
    _on_one_device(q, k, v, i, f, C, n, m, slots)
    return v.new_empty(v.shape)
