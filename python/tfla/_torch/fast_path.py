"""The calls of `derivatives` with less host time. A reader may skip this file: nothing here changes a result.

Where the time goes is measured by `make bench-python`; docs/python/api.md has its tables under "Host time". Each trick
says what it leaves out. Under torch.compile none of them is used: a graph has no host time of Python's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch import Tensor, is_grad_enabled

from tfla._options import OPTIONS, encode
from tfla._torch import derivatives, operators
from tfla._torch.derivatives import keeps
from tfla._torch.memory import torch_error
from tfla._torch.operators import TENSORS, TOKENS
from tfla._torch.transforms import below_autograd as _below_autograd
from tfla._torch.transforms import transforms_active

# Calling an operator, `op(...)`, is a Python function around `op._op(...)`.
_forward_alone, _backward_alone = operators.forward_alone._op, operators.backward_alone._op
_forward_with_saved_alone = operators.forward_with_saved_alone._op
_step, _step_alone = operators.step._op, operators.step_alone._op
_increment_version = torch.autograd.graph.increment_version
# One question in place of one for the device of q. Torch's own, and unknown to torch.compile: slower without it, not
# wrong.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

# Operators that take tensors alone are there because each argument costs host time, one at its default too. They have
# no derivative: what calls them is inside of one, or of none. Without this PyTorch would have them pass through a
# kernel that looks for gradients to warn about.
_underived = torch.library.Library("tfla", "IMPL")
for _operator in (
    operators.forward_alone,
    operators.forward_with_saved_alone,
    operators.backward_alone,
    operators.step_alone,
):
    _underived.impl(_operator, torch.library.fallthrough_kernel, "Autograd")


# ---------------------------------------------------------------- options
_encoded: dict[tuple, tuple] = {}


def encoded(given: tuple) -> tuple:
    """`encode`, whose answers are kept."""
    try:
        return _encoded[given]
    except (KeyError, TypeError):  # of which the second means an option that has no hash, to be refused
        options = encode(given)
    if len(_encoded) < 1000 and all(x is None or type(x) in (str, float, int, bool) for x in given):
        _encoded[given] = options
    return options


# ---------------------------------------------------------------- sequences
class _Eager(torch.autograd.Function):
    """What is registered in `derivatives` costs several times the host time of this. Every input of a Function costs
    some, so what has no gradient travels in one tuple; and the dispatcher's autograd layer is skipped, since it has
    nothing to do in here."""

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
        output, saved = derivatives.without_saved(operator, output)
        # Those without a gradient too: torch then notices when they are changed before backward.
        ctx.save_for_backward(saved, *differentiable, *inputs[len(differentiable) : TENSORS])
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(output[3])
        return output

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dC: Tensor | None = None, dn: Tensor | None = None, *_: Any) -> tuple:
        saved = ctx.saved_tensors
        if dh is None:
            if dC is None and dn is None:
                return (None,) * (2 + ctx.given)
            dh = derivatives.zeros_for(saved[3])
        try:
            if is_grad_enabled():  # a second derivative may follow: let the dispatcher see this call, and refuse
                grads = operators.backward(dh, dC, dn, *saved, *ctx.options)
            else:
                with _below_autograd():
                    grads = operators.backward._op(dh, dC, dn, *saved, *ctx.options)
        except RuntimeError as error:
            raise torch_error(error) from None
        return (None, None, *grads[: ctx.given])


class _Alone(torch.autograd.Function):
    """The same for q, k, v, i, f with nothing else, by operators that have no derivative to skip."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        try:
            if keeps(q):
                h, saved = _forward_with_saved_alone(q, k, v, i, f)
            else:
                h, saved = _forward_alone(q, k, v, i, f), None
        except RuntimeError as error:
            raise torch_error(error) from None
        ctx.save_for_backward(saved, q, k, v, i, f)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple:
        try:
            if is_grad_enabled():  # see above
                return operators.backward(dh, None, None, *ctx.saved_tensors)[:TOKENS]
            return _backward_alone(dh, *ctx.saved_tensors)
        except RuntimeError as error:
            raise torch_error(error) from None


# What Function.apply calls in the end. Before that it asks for transforms of torch.func, as the calls below do, and
# looks for tensors that were leaked out of one that has ended; they are taken as they are here, as operators take them.
_apply_eager = super(torch.autograd.Function, _Eager).apply
_apply_alone = super(torch.autograd.Function, _Alone).apply


def call(operator: Any, inputs: tuple) -> Any:
    """`derivatives.call`."""
    if len(inputs) == TOKENS and operator is operators.forward:
        return call_alone(*inputs)
    if transforms_active() or _forward_ad._current_level >= 0:
        return derivatives.call(operator, inputs)
    given = derivatives.differentiable(inputs)
    if derivatives.trains(given):
        return _apply_eager(derivatives.saving(operator, inputs), inputs, *given)
    try:
        with _below_autograd():
            return operator._op(*inputs)
    except RuntimeError as error:
        raise torch_error(error) from None


def call_alone(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """forward of these and nothing else. mlstm comes here at once where it has no options: filling in and comparing so
    many defaults takes a tenth of a call's host time."""
    if transforms_active() or _forward_ad._current_level >= 0:
        return derivatives.call(operators.forward, (q, k, v, i, f))
    try:
        trains = is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or i.requires_grad or f.requires_grad
        )
    except AttributeError:  # no tensor: for the operator to refuse
        trains = False
    if trains:
        return _apply_alone(q, k, v, i, f)
    try:
        return _forward_alone(q, k, v, i, f)
    except RuntimeError as error:
        raise torch_error(error) from None


# ---------------------------------------------------------------- steps
_STEP_DEFAULTS = tuple(option.default for option in OPTIONS if option.of_steps)


def step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C: Tensor, n: Tensor, m: Tensor, slots: Any, given: tuple
) -> Tensor:
    """The step is called for every token, mostly without slots and options, of which each costs host time."""
    try:
        if slots is None and given == _STEP_DEFAULTS:
            h = _step_alone(q, k, v, i, f, C, n, m)
        else:
            h = _step(q, k, v, i, f, C, n, m, slots, *encoded(given))
    except RuntimeError as error:
        raise torch_error(error) from None
    _increment_version((C, n, m))  # a graph that has saved the state must not go on from the new one
    return h
