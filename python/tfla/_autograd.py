"""Derivatives of the operators, and how mlstm and its relatives call them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch import Tensor, is_grad_enabled

from tfla import _operators
from tfla._memory import torch_error
from tfla._options import DEFAULTS, RECURRENT

# Inputs of forward before its options: q, k, v, i, f, C, n, m, cu_seqlens. Those from m on have no gradient. What is at
# its default at the end may be left out.
TOKENS, DIFFERENTIABLE, TENSORS = 5, 7, 9
FORMULATION = TENSORS + len(DEFAULTS) - 1  # the last option


def _zeros_for(v: Tensor) -> Tensor:
    """The gradient of an h that nobody used."""
    return torch.zeros_like(v, memory_format=torch.contiguous_format)


def _refuse(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("tfla: mlstm was asked for a second derivative (double backward); it has first derivatives only")


def _save(ctx: Any, inputs: tuple, rows: Tensor | None = None, last_m: Tensor | None = None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, *inputs[:TENSORS], *(None,) * (TENSORS - len(inputs)))
    ctx.options = inputs[TENSORS:]
    if last_m is not None:
        ctx.mark_non_differentiable(last_m)  # m fixes the scale of C and n and has no gradient of its own


def _gradients(backward: Any, ctx: Any, dh: Tensor | None, dC: Tensor | None = None, dn: Tensor | None = None, *_: Any):
    """Of all inputs."""
    rows, *inputs = ctx.saved_tensors
    rest = (None,) * (TENSORS - DIFFERENTIABLE + len(ctx.options))
    if dh is None:
        if dC is None and dn is None:
            return (None,) * DIFFERENTIABLE + rest
        dh = _zeros_for(inputs[2])
    grads = backward(dh, dC, dn, rows, *inputs, *ctx.options)
    return (*(grads if inputs[TOKENS] is not None else (*grads[:TOKENS], None, None)), *rest)


# Three ways to the same two functions. This one serves torch.compile and whoever calls torch.ops.tfla; called eagerly
# it costs several times the host time of the next one, and torch.func does not go through it.
def _register(name: str, setup_context: Any) -> None:
    def backward(ctx: Any, dh: Tensor | None, *grads: Tensor | None) -> tuple:
        # What follows h are states, or rows, which have no gradient.
        return _gradients(_operators.backward, ctx, dh, *(grads if len(grads) == 3 else ()))

    torch.library.register_autograd(f"tfla::{name}", backward, setup_context=setup_context)


def _save_rows(ctx: Any, inputs: tuple, output: tuple) -> None:
    _save(ctx, inputs, output[1])
    ctx.mark_non_differentiable(output[1])


_register("mlstm", lambda ctx, inputs, output: _save(ctx, inputs))
_register("mlstm_with_rows", _save_rows)
_register("mlstm_with_state", lambda ctx, inputs, output: _save(ctx, inputs, last_m=output[3]))
torch.library.register_autograd("tfla::mlstm_backward", _refuse, setup_context=lambda ctx, inputs, output: None)

# These may be gone from a future torch, being its own: then calls are slower, not wrong.
_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


class _Eager(torch.autograd.Function):
    """The lean way: every input of a Function costs host time, so what has no gradient travels in one tuple, and the
    dispatcher's autograd layer is skipped, since it has nothing to do in here. `_op` is what an operator calls."""

    @staticmethod
    def forward(ctx: Any, operator: Any, inputs: tuple, *differentiable: Tensor) -> Any:
        try:
            with _below_autograd():
                output = operator._op(*inputs)
        except RuntimeError as error:
            raise torch_error(error) from None
        ctx.set_materialize_grads(False)
        ctx.given = len(differentiable)
        ctx.options = inputs[TENSORS:]
        rows = None
        if operator is _operators.forward_with_rows:
            output, rows = output
        # Those without a gradient too: torch then notices when they are changed before backward.
        ctx.save_for_backward(rows, *differentiable, *inputs[len(differentiable) : TENSORS])
        if operator is _operators.forward_with_state:
            ctx.mark_non_differentiable(output[3])
        return output

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dC: Tensor | None = None, dn: Tensor | None = None, *_: Any) -> tuple:
        saved = ctx.saved_tensors
        if dh is None:
            if dC is None and dn is None:
                return (None,) * (2 + ctx.given)
            dh = _zeros_for(saved[3])
        try:
            if is_grad_enabled():  # a second derivative may follow: let the dispatcher see this call, and refuse
                grads = _operators.backward(dh, dC, dn, *saved, *ctx.options)
            else:
                with _below_autograd():
                    grads = _operators.backward._op(dh, dC, dn, *saved, *ctx.options)
        except RuntimeError as error:
            raise torch_error(error) from None
        return (None, None, *grads[: ctx.given])


_forward_alone, _with_rows_alone = _operators.forward_alone._op, _operators.forward_with_rows_alone._op
_backward_alone = _operators.backward_alone._op


class _Alone(torch.autograd.Function):
    """The same for q, k, v, i, f with nothing else, by operators that have no derivative to skip."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        try:
            if _has_rows(q):
                h, rows = _with_rows_alone(q, k, v, i, f)
            else:
                h, rows = _forward_alone(q, k, v, i, f), None
        except RuntimeError as error:
            raise torch_error(error) from None
        ctx.save_for_backward(rows, q, k, v, i, f)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple:
        try:
            if is_grad_enabled():  # see above
                return _operators.backward(dh, None, None, *ctx.saved_tensors)[:TOKENS]
            return _backward_alone(dh, *ctx.saved_tensors)
        except RuntimeError as error:
            raise torch_error(error) from None


# What Function.apply calls in the end. Before that it asks for transforms of torch.func, as `call` does, and looks for
# tensors that were leaked out of one that has ended; they are taken as they are here, as operators take them.
_apply_eager = super(torch.autograd.Function, _Eager).apply
_apply_alone = super(torch.autograd.Function, _Alone).apply


class _Transformed(torch.autograd.Function):
    """The way under torch.func's grad and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Any, options: tuple, *tensors: Any) -> Any:
        with _below_autograd():
            return operator(*tensors, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _save(ctx, (*inputs[2:], *inputs[1]), last_m=output[3] if isinstance(output, tuple) else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return (None, None, *_gradients(_TransformedBackward.apply, ctx, *grads)[:TENSORS])


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


def _given(inputs: tuple) -> tuple:
    """Those of the inputs that have gradients."""
    if len(inputs) == TOKENS:
        return inputs
    return inputs[: TOKENS if inputs[TOKENS] is None else DIFFERENTIABLE]


def _trains(given: tuple) -> bool:
    """What is no tensor is for the operator to refuse."""
    return is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in given)


def _has_rows(q: Tensor) -> bool:
    """On a GPU forward hands its denominators to backward."""
    return getattr(q, "is_cuda", False)  # see _trains


def _hands_rows(operator: Any, inputs: tuple) -> bool:
    """Whether this call does so: not where backward computes by another formulation."""
    return operator is _operators.forward and _has_rows(inputs[0]) and inputs[FORMULATION:] != (RECURRENT,)


def call_traced(operator: Any, inputs: tuple) -> Any:
    """forward or forward_with_state under torch.compile."""
    if _hands_rows(operator, inputs) and _trains(_given(inputs)):
        return _operators.forward_with_rows(*inputs)[0]
    return operator(*inputs)


def call(operator: Any, inputs: tuple) -> Any:
    """forward or forward_with_state, in the cheapest way that is right here."""
    if transforms_active():
        padded = (*inputs, *(None,) * (TENSORS - len(inputs)))
        return _Transformed.apply(operator, padded[TENSORS:], *padded[:TENSORS])
    given = _given(inputs)
    if _trains(given):
        if _hands_rows(operator, inputs):
            operator = _operators.forward_with_rows
        return _apply_eager(operator, inputs, *given)
    if _forward_ad._current_level >= 0:  # to be refused
        return _apply_eager(operator, inputs, *given)
    try:
        with _below_autograd():
            return operator._op(*inputs)
    except RuntimeError as error:
        raise torch_error(error) from None


def call_alone(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """forward of these and nothing else, with as little as possible on the way."""
    if transforms_active() or _forward_ad._current_level >= 0:
        return call(_operators.forward, (q, k, v, i, f))
    try:
        trains = is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or i.requires_grad or f.requires_grad
        )
    except AttributeError:  # see _trains
        trains = False
    if trains:
        return _apply_alone(q, k, v, i, f)
    try:
        return _forward_alone(q, k, v, i, f)
    except RuntimeError as error:
        raise torch_error(error) from None
