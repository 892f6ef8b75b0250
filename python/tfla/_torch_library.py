"""What PyTorch needs to know about the operators beyond their kernels: shapes (fake kernels) and derivatives.

The kernels and schemas are in bindings/torch.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla import _native

torch.ops.load_library(_native.library("libtfla_torch.so"))

forward = torch.ops.tfla.mlstm.default
backward = torch.ops.tfla.mlstm_backward.default
step = torch.ops.tfla.mlstm_step.default

NO_SECOND_DERIVATIVE = "tfla: mlstm has no second derivative; its gradient was asked for a gradient (double backward)"


def state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.register_fake("tfla::mlstm")
def _(q, k, v, i, f, C, n, m, cu_seqlens, *options):
    head_first, output_final_state = options[-2:]
    h = v.new_empty(v.shape)
    if not output_final_state:
        return h, *(q.new_empty(0, dtype=torch.float32) for _ in range(3))
    states = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads = v.shape[1 if head_first else 2]
    shape = (states, heads, q.shape[3], v.shape[3])
    return h, *(q.new_empty(shape[:axes], dtype=state_dtype(q)) for axes in (4, 3, 2))


@torch.library.register_fake("tfla::mlstm_backward")
def _(dh, dC, dn, q, k, v, i, f, C, n, m, cu_seqlens, *options):
    grads = [x.new_empty(x.shape) for x in (q, k, v, i, f)]
    states = [q.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape) for x in (C, n)]
    return (*grads, *states)


@torch.library.register_fake("tfla::mlstm_step")
def _(q, k, v, *rest):
    return v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, i, f, C, n, m, cu_seqlens, *options = inputs
    *ctx.options, output_final_state = options
    ctx.set_materialize_grads(False)
    # m fixes the scale of C and n and has no gradient of its own.
    ctx.mark_non_differentiable(*(output[3:] if output_final_state else output[1:]))
    ctx.save_for_backward(q, k, v, i, f, C, n, m, cu_seqlens)


def _backward(ctx: Any, dh: Tensor | None, dC: Tensor | None, dn: Tensor | None, _dm: Tensor | None) -> tuple:
    q, k, v, i, f, C, n, m, cu_seqlens = ctx.saved_tensors
    nothing: Sequence[None] = (None,) * (len(ctx.options) + 3)
    if dh is None:
        if dC is None and dn is None:
            return (None,) * 8 + tuple(nothing)
        dh = torch.zeros_like(v)
    grads = backward(dh, dC, dn, q, k, v, i, f, C, n, m, cu_seqlens, *ctx.options)
    states = grads[5:] if C is not None else (None, None)
    return (*grads[:5], *states, *nothing)


torch.library.register_autograd("tfla::mlstm", _backward, setup_context=_setup_context)


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


torch.library.register_autograd("tfla::mlstm_backward", _refuse, setup_context=lambda ctx, inputs, output: None)
