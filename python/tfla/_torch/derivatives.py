"""Derivatives of the operators, and the plain way to call them: right under every transformation of PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from tfla._options import CODES
from tfla._torch import operators
from tfla._torch.operators import DIFFERENTIABLE, FORMULATION, SAVING, TENSORS, TOKENS
from tfla._torch.transforms import refusal, transformable, transformed

_RECURRENT = (CODES.formulation["recurrent"],)


# ---------------------------------------------------------------- the gradient, from what forward saved
def zeros_for(v: Tensor) -> Tensor:
    """The gradient of an h that nobody used."""
    return torch.zeros_like(v, memory_format=torch.contiguous_format)


_refuse = refusal("mlstm")


def _save(ctx: Any, inputs: tuple, last_m: Tensor | None = None, saved: Tensor | None = None) -> None:
    """saved: what forward has left for backward, one blob whose size the plan says."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(saved, *inputs[:TENSORS], *(None,) * (TENSORS - len(inputs)))
    ctx.options = inputs[TENSORS:]
    # m fixes the scale of C and n and has no gradient of its own.
    ctx.mark_non_differentiable(*(x for x in (last_m, saved) if x is not None))


def _gradients(backward: Any, ctx: Any, dh: Tensor | None, dC: Tensor | None = None, dn: Tensor | None = None, *_: Any):
    """Of all inputs."""
    saved, *inputs = ctx.saved_tensors
    rest = (None,) * (TENSORS - DIFFERENTIABLE + len(ctx.options))
    if dh is None:
        if dC is None and dn is None:
            return (None,) * DIFFERENTIABLE + rest
        dh = zeros_for(inputs[2])
    grads = backward(dh, dC, dn, saved, *inputs, *ctx.options)
    return (*(grads if inputs[TOKENS] is not None else (*grads[:TOKENS], None, None)), *rest)


# ---------------------------------------------------------------- for autograd, torch.compile and torch.ops.tfla
def _register(operator: Any, *, last_state: bool = False, saved: bool = False) -> None:
    """last_state, saved: whether it returns them after h."""

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _save(ctx, inputs, output[3] if last_state else None, output[-1] if saved else None)

    def backward(ctx: Any, dh: Tensor | None, *grads: Tensor | None) -> tuple:
        return _gradients(operators.backward, ctx, dh, *(grads if last_state else ()))

    torch.library.register_autograd(operator, backward, setup_context=setup_context)


_register(operators.forward)
_register(operators.forward_with_saved, saved=True)
_register(operators.forward_with_state, last_state=True)
_register(operators.forward_with_state_and_saved, last_state=True, saved=True)
torch.library.register_autograd("tfla::mlstm_backward", _refuse, setup_context=lambda ctx, inputs, output: None)


# ---------------------------------------------------------------- for torch.func
def _save_transformed(ctx: Any, inputs: tuple, output: Any) -> None:
    _save(ctx, inputs, last_m=output[3] if isinstance(output, tuple) else None)


_call_transformed = transformable(operators.backward, TENSORS, _save_transformed, _gradients, _refuse)


# ---------------------------------------------------------------- calls
def differentiable(inputs: tuple) -> tuple:
    """Those of the inputs that have gradients."""
    if len(inputs) == TOKENS:
        return inputs
    return inputs[: TOKENS if inputs[TOKENS] is None else DIFFERENTIABLE]


def trains(inputs: tuple) -> bool:
    """What is no tensor is for the operator to refuse."""
    return is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)


def keeps(q: Tensor) -> bool:
    """On a GPU forward keeps for backward what the option `keep` says."""
    return getattr(q, "is_cuda", False)  # see `trains`


def saving(operator: Any, inputs: tuple) -> Any:
    """The operator by which a call that trains runs; another one where forward keeps something, which it does not where
    backward computes by another formulation."""
    return SAVING[operator] if keeps(inputs[0]) and inputs[FORMULATION:] != _RECURRENT else operator


def without_saved(operator: Any, output: Any) -> tuple[Any, Tensor | None]:
    """The results that were asked for, and what backward is to have."""
    if operator is operators.forward_with_saved:
        return output
    return (output[:-1], output[-1]) if operator is operators.forward_with_state_and_saved else (output, None)


def call(operator: Any, inputs: tuple) -> Any:
    """forward or forward_with_state."""
    if not is_compiling() and transformed():
        return _call_transformed(operator, inputs)
    if trains(differentiable(inputs)):
        operator = saving(operator, inputs)
    return without_saved(operator, operator(*inputs))[0]
