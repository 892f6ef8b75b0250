"""The operators of bindings/torch_delta.cc with all that PyTorch must know about them: derivatives, shapes, vmap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tfla._torch import operators  # noqa: F401  (loads the library)
from tfla._torch.derivatives import zeros_for
from tfla._torch.fake import gradient_of, on_one_device, state_dtype, state_shapes
from tfla._torch.transforms import refusal, transformable, transformed
from tfla._torch.vmap import fold, refuse_packed, refuse_shared

# Inputs of those for sequences, before their options: q, k, v, beta, g, A_log, dt_bias, C, cu_seqlens. The last has no
# gradient. What is at its default at the end may be left out.
DIFFERENTIABLE, TENSORS = 8, 9

forward = torch.ops.tfla.delta_rule.default  # h
forward_with_state = torch.ops.tfla.delta_rule_with_state.default  # h, C
backward = torch.ops.tfla.delta_rule_backward.default  # dq, dk, dv, dbeta, dg, dA_log, ddt_bias, dC
step = torch.ops.tfla.delta_rule_step.default  # h; C in place


# ---------------------------------------------------------------- derivatives
def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *(None,) * (TENSORS - len(inputs)))
    ctx.options = inputs[TENSORS:]


def _gradients(operator: Any, ctx: Any, dh: Tensor | None, dC: Tensor | None = None) -> tuple:
    """Of all inputs."""
    inputs = ctx.saved_tensors
    rest = (None,) * (TENSORS - DIFFERENTIABLE + len(ctx.options))
    if dh is None:
        if dC is None:
            return (None,) * DIFFERENTIABLE + rest
        dh = zeros_for(inputs[2])
    grads = operator(dh, dC, *inputs, *ctx.options)
    return (*(None if x is None else grad for x, grad in zip(inputs, grads, strict=False)), *rest)


_refuse = refusal("delta_rule")
for _operator in (forward, forward_with_state):
    torch.library.register_autograd(
        _operator, lambda ctx, *grads: _gradients(backward, ctx, *grads), setup_context=_save
    )
torch.library.register_autograd(backward, _refuse, setup_context=lambda ctx, inputs, output: None)
_call_transformed = transformable(backward, TENSORS, _save, _gradients, _refuse)


def call(operator: Any, inputs: tuple) -> Any:
    """forward or forward_with_state."""
    if not is_compiling() and transformed():
        return _call_transformed(operator, inputs)
    return operator(*inputs)


# ---------------------------------------------------------------- shapes, dtypes and devices of results
@torch.library.register_fake(forward)
def _(q, k, v, beta, g=None, A_log=None, dt_bias=None, C=None, cu_seqlens=None, *options):
    on_one_device(q, k, v, beta, g, A_log, dt_bias, C, cu_seqlens)
    return v.new_empty(v.shape)


@torch.library.register_fake(forward_with_state)
def _(
    q, k, v, beta, g=None, A_log=None, dt_bias=None, C=None, cu_seqlens=None,
    write=0, normalize_qk=False, head_first=False, *options,
):  # fmt: skip
    on_one_device(q, k, v, beta, g, A_log, dt_bias, C, cu_seqlens)
    shape = state_shapes(q, v, cu_seqlens, head_first)[0]
    return v.new_empty(v.shape), q.new_empty(shape, dtype=state_dtype(q))


@torch.library.register_fake(backward)
def _(dh, dC, q, k, v, beta, g=None, A_log=None, dt_bias=None, C=None, cu_seqlens=None, *options):
    on_one_device(dh, dC, q, k, v, beta, g, A_log, dt_bias, C, cu_seqlens)
    return tuple(gradient_of(x, q) for x in (q, k, v, beta, g, A_log, dt_bias, C))


@torch.library.register_fake(step)
def _(q, k, v, beta, g, A_log, dt_bias, C, slots=None, *options):
    on_one_device(q, k, v, beta, g, A_log, dt_bias, C, slots)
    return v.new_empty(v.shape)


# ---------------------------------------------------------------- vmap
# The new axis becomes part of the batch. A_log and dt_bias have none: where each call has its own, or its own gradient
# of them, the new axis becomes part of the heads.
_TOKENS, _OF_HEADS, _STATE = range(3)  # what an argument or a result is, by which axes it has
_INPUTS = (*(_TOKENS,) * 5, *(_OF_HEADS,) * 2, _STATE)
_HEAD_FIRST = 2  # of the options


def _axes(by_heads: bool, head_first: bool) -> tuple[int | None, int | None, int | None]:
    """The axis that is merged with vmap's, of each kind."""
    return (1 if head_first else 2, 0, 1) if by_heads else (0, None, 0)


def _head_first(options: tuple) -> bool:
    return len(options) > _HEAD_FIRST and options[_HEAD_FIRST]


def _fold_all(inputs: tuple, in_dims: tuple, size: int, at: tuple) -> list:
    rows = zip(inputs, in_dims, at, strict=True)
    return [x if axis is None else fold(x, dim, size, axis) for x, dim, axis in rows]


def _unfold(x: Tensor, size: int, at: int | None) -> tuple[Tensor, int | None]:
    """A gradient of what was not given is empty, and stays one for all."""
    if at is None or (x.numel() == 0 and x.dim() == 1):
        return x, None
    return x.unflatten(at, (size, x.shape[at] // size)), at


def _register_vmap(operator: Any, before: tuple[int, ...], results: tuple[int, ...]) -> None:
    """before: kinds of the inputs before q, which are gradients."""
    kinds, first = (*before, *_INPUTS), len(before)

    def rule(info: Any, in_dims: tuple, *inputs: Any) -> Any:
        missing = (None,) * (len(kinds) + 1 - len(inputs))  # at their defaults
        inputs, in_dims, size = (*inputs, *missing), (*in_dims, *missing), info.batch_size
        refuse_packed(inputs[len(kinds)])
        options = inputs[len(kinds) + 1 :]
        per_head = slice(first + 5, first + 7)
        by_heads = in_dims[per_head] != (None, None) or (first > 0 and inputs[per_head] != (None, None))
        axes = _axes(by_heads, _head_first(options))
        at = tuple(axes[kind] for kind in kinds)
        output = operator(*_fold_all(inputs[: len(kinds)], in_dims[: len(kinds)], size, at), None, *options)
        if isinstance(output, Tensor):
            return _unfold(output, size, axes[_TOKENS])
        unfolded = [_unfold(x, size, axes[kind]) for x, kind in zip(output, results, strict=True)]
        return tuple(zip(*unfolded, strict=True))

    torch.library.register_vmap(operator, rule)


_register_vmap(forward, (), (_TOKENS,))
_register_vmap(forward_with_state, (), (_TOKENS, _STATE))
_register_vmap(backward, (_TOKENS, _STATE), _INPUTS)


@torch.library.register_vmap(step)
def _(info: Any, in_dims: tuple, *inputs: Any) -> Any:
    size, options = info.batch_size, inputs[TENSORS:]
    refuse_shared(inputs[8] if len(inputs) > 8 else None, in_dims[7:8])
    one_token = inputs[0].dim() - (in_dims[0] is not None) == 3
    axes = _axes(in_dims[5:7] != (None, None), one_token or _head_first(options))
    at = tuple(axes[kind] for kind in _INPUTS)
    # The state is a copy where its axes do not lie one behind the other.
    *tokens, folded = _fold_all(inputs[:8], in_dims[:8], size, at)
    h = step(*tokens, folded, None, *options)
    if folded.data_ptr() != inputs[7].data_ptr():
        inputs[7].copy_(_unfold(folded, size, axes[_STATE])[0].movedim(axes[_STATE] or 0, in_dims[7]))
    return _unfold(h, size, axes[_TOKENS])
