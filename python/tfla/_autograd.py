"""Derivatives of the operators, and how mlstm and its relatives call them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from tfla import _operators
from tfla._options import RECURRENT

# Inputs of forward before its options: q, k, v, i, f, C, n, m, cu_seqlens. Those from m on have no gradient.
TENSORS, DIFFERENTIABLE = 9, 7


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.options = inputs[TENSORS:]
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[3])  # m fixes the scale of C and n and has no gradient of its own


def _zeros_for(inputs: tuple) -> Tensor:
    """The gradient of an h that nobody used."""
    return torch.zeros_like(inputs[2], memory_format=torch.contiguous_format)


def _gradients(backward: Any, ctx: Any, dh: Tensor | None, dC: Tensor | None = None, dn: Tensor | None = None, *_: Any):
    """Of q, k, v, i, f, C, n."""
    inputs = ctx.saved_tensors
    if dh is None:
        if dC is None and dn is None:
            return (None,) * DIFFERENTIABLE
        dh = _zeros_for(inputs)
    grads = backward(dh, dC, dn, *inputs, *ctx.options)
    return grads if inputs[5] is not None else (*grads[:5], None, None)


def _refuse(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("tfla: mlstm was asked for a second derivative (double backward); it has first derivatives only")


# Three ways to the same two functions. This one serves torch.compile and whoever calls torch.ops.tfla; called eagerly
# it costs several times the host time of the next one, and torch.func does not go through it.
def _registered_backward(ctx: Any, *grads: Tensor | None) -> tuple:
    return (*_gradients(_operators.backward, ctx, *grads), *(None,) * (TENSORS - DIFFERENTIABLE + len(ctx.options)))


torch.library.register_autograd("tfla::mlstm", _registered_backward, setup_context=_save)
torch.library.register_autograd("tfla::mlstm_with_state", _registered_backward, setup_context=_save)


def _save_with_rows(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], output[1])
    ctx.options = inputs[TENSORS:]
    ctx.mark_non_differentiable(output[1])


def _backward_with_rows(ctx: Any, dh: Tensor | None, *_: Any) -> tuple:
    *inputs, rows = ctx.saved_tensors
    rest = (None,) * (TENSORS - DIFFERENTIABLE + len(ctx.options))
    if dh is None:
        return (None,) * DIFFERENTIABLE + rest
    grads = _operators.backward_with_rows(rows, dh, None, None, *inputs, *ctx.options)
    return (*(grads if inputs[5] is not None else (*grads[:5], None, None)), *rest)


torch.library.register_autograd("tfla::mlstm_with_rows", _backward_with_rows, setup_context=_save_with_rows)
torch.library.register_autograd(
    "tfla::mlstm_backward_with_rows", _refuse, setup_context=lambda ctx, inputs, output: None
)
torch.library.register_autograd("tfla::mlstm_backward", _refuse, setup_context=lambda ctx, inputs, output: None)

# Both may be gone from a future torch, being its own: then calls are slower, not wrong.
_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


class _Eager(torch.autograd.Function):
    """The lean way: every input of a Function costs host time, so what has no gradient travels in one tuple, and the
    dispatcher's autograd layer is skipped, since it has nothing to do in here."""

    @staticmethod
    def forward(ctx: Any, operator: Any, inputs: tuple, *differentiable: Tensor) -> Any:
        with _below_autograd():
            output = operator(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*differentiable)
        ctx.rest = inputs[DIFFERENTIABLE:]
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(output[3])
        return output

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dC: Tensor | None = None, dn: Tensor | None = None, *_: Any) -> tuple:
        saved = ctx.saved_tensors
        if dh is None:
            if dC is None and dn is None:
                return (None,) * (2 + len(saved))
            dh = _zeros_for(saved)
        inputs = saved if len(saved) == DIFFERENTIABLE else (*saved, None, None)
        if torch.is_grad_enabled():  # a second derivative may follow: let the dispatcher see this call, and refuse
            grads = _operators.backward(dh, dC, dn, *inputs, *ctx.rest)
        else:
            with _below_autograd():
                grads = _operators.backward(dh, dC, dn, *inputs, *ctx.rest)
        return (None, None, *grads[: len(saved)])


class _EagerWithRows(torch.autograd.Function):
    """The same on a GPU, where forward hands its denominators to backward."""

    @staticmethod
    def forward(ctx: Any, inputs: tuple, *differentiable: Tensor) -> Tensor:
        with _below_autograd():
            h, rows = _operators.forward_with_rows(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*differentiable, rows)
        ctx.rest = inputs[DIFFERENTIABLE:]
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None) -> tuple:
        *saved, rows = ctx.saved_tensors
        if dh is None:
            return (None,) * (1 + len(saved))
        inputs = saved if len(saved) == DIFFERENTIABLE else (*saved, None, None)
        with contextlib.nullcontext() if torch.is_grad_enabled() else _below_autograd():
            grads = _operators.backward_with_rows(rows, dh, None, None, *inputs, *ctx.rest)
        return (None, *grads[: len(saved)])


class _Transformed(torch.autograd.Function):
    """The way under torch.func's grad and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Any, options: tuple, *tensors: Any) -> Any:
        with _below_autograd():
            return operator(*tensors, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _save(ctx, (*inputs[2:], *inputs[1]), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return (None, None, *_gradients(_TransformedBackward.apply, ctx, *grads), None, None)


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:
        with _below_autograd():
            return _operators.backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    backward = staticmethod(_refuse)


def _trains_on_gpu(inputs: tuple) -> bool:
    return (
        inputs[0].is_cuda
        and inputs[-2] != RECURRENT  # its gradient is computed by another formulation
        and torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in inputs[:DIFFERENTIABLE])
    )


def call(operator: Any, *inputs: Any) -> Any:
    """forward or forward_with_state, in the cheapest way that is right here."""
    if torch.compiler.is_compiling():
        if operator is _operators.forward and _trains_on_gpu(inputs):
            return _operators.forward_with_rows(*inputs)[0]
        return operator(*inputs)
    if _transforms_active():
        return _Transformed.apply(operator, inputs[TENSORS:], *inputs[:TENSORS])
    if torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
        if operator is _operators.forward and _trains_on_gpu(inputs):
            return _EagerWithRows.apply(inputs, *inputs[: 5 if inputs[5] is None else DIFFERENTIABLE])
        return _Eager.apply(operator, inputs, *inputs[: 5 if inputs[5] is None else DIFFERENTIABLE])
    with _below_autograd():
        return operator(*inputs)
