"""The operators of bindings/torch_conv.cc with all that PyTorch must know about them: derivatives, shapes, vmap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tfla._torch import operators  # noqa: F401  (loads the library)
from tfla._torch.derivatives import zeros_for
from tfla._torch.fake import gradient_of, on_one_device
from tfla._torch.transforms import refusal, transformable, transformed

# Inputs of those for sequences, before their option: x, weight, bias, initial_state, cu_seqlens, seq_idx. The last two
# have no gradient. What is at its default at the end may be left out.
DIFFERENTIABLE, TENSORS = 4, 6

forward = torch.ops.tfla.causal_conv1d.default  # y
forward_with_state = torch.ops.tfla.causal_conv1d_with_state.default  # y, the last state in the dtype of x
backward = torch.ops.tfla.causal_conv1d_backward.default  # dx, dweight, dbias, dinitial_state
step = torch.ops.tfla.causal_conv1d_step.default  # y; the state in place


# ---------------------------------------------------------------- derivatives
def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *(None,) * (TENSORS - len(inputs)))
    ctx.options = inputs[TENSORS:]


def _gradients(operator: Any, ctx: Any, dy: Tensor | None, dstate: Tensor | None = None) -> tuple:
    """Of all inputs."""
    inputs = ctx.saved_tensors
    rest = (None,) * (TENSORS - DIFFERENTIABLE + len(ctx.options))
    if dy is None:
        if dstate is None:
            return (None,) * DIFFERENTIABLE + rest
        dy = zeros_for(inputs[0])
    grads = operator(dy, dstate, *inputs, *ctx.options)
    return (*(None if x is None else grad for x, grad in zip(inputs, grads, strict=False)), *rest)


_refuse = refusal("causal_conv1d")
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
def _laid_as(x: Tensor) -> Tensor:
    """Tokens lie side by side in memory where those of x do, else channels."""
    if x.dim() == 3 and x.stride(2) != 1 and x.stride(1) == 1:
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)
    return x.new_empty(x.shape)


@torch.library.register_fake(forward)
def _(x, weight, bias=None, initial_state=None, cu_seqlens=None, seq_idx=None, activation=0):
    on_one_device(x, weight, bias, initial_state, cu_seqlens, seq_idx)
    return _laid_as(x)


@torch.library.register_fake(forward_with_state)
def _(x, weight, bias=None, initial_state=None, cu_seqlens=None, seq_idx=None, activation=0):
    on_one_device(x, weight, bias, initial_state, cu_seqlens, seq_idx)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _laid_as(x), x.new_empty(sequences, weight.shape[1] - 1, x.shape[2])


@torch.library.register_fake(backward)
def _(dy, dstate, x, weight, bias=None, initial_state=None, cu_seqlens=None, seq_idx=None, activation=0):
    on_one_device(dy, dstate, x, weight, bias, initial_state, cu_seqlens, seq_idx)
    return _laid_as(x), weight.new_empty(weight.shape), gradient_of(bias, x), gradient_of(initial_state, x)


@torch.library.register_fake(step)
def _(x, weight, bias, state, slots=None, cache_seqlens=None, activation=0):
    on_one_device(x, weight, bias, state, slots, cache_seqlens)
    return _laid_as(x)


# ---------------------------------------------------------------- vmap
# The new axis becomes part of the channels, which all know nothing of each other: each call then has weights, and
# gradients of them, of its own.
_CHANNELS = (-1, 0, 0, -1)  # the axis that is merged with vmap's: of x, weight, bias, state


def _fold(x: Tensor | None, dim: int | None, size: int, axis: int) -> Tensor | None:
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    axis = axis % (x.dim() - 1)
    return x.movedim(0, axis).flatten(axis, axis + 1)


def _unfold(x: Tensor, size: int, axis: int) -> tuple[Tensor, int | None]:
    """A gradient of what was not given is empty, and stays one for all."""
    if x.numel() == 0 and x.dim() == 1:
        return x, None
    axis = axis % x.dim()
    return x.unflatten(axis, (size, x.shape[axis] // size)), axis


def _refuse_batched(names: tuple[str, str], dims: tuple) -> None:
    for name, dim in zip(names, dims, strict=True):
        if dim is not None:
            raise ValueError(f"tfla: {name} is batched by vmap; it must be one for all calls")


def _register_vmap(operator: Any, before: tuple[int, ...], results: tuple[int, ...]) -> None:
    """before: the axes of the inputs before x, which are gradients."""
    axes, count = (*before, *_CHANNELS), len(before) + TENSORS

    def rule(info: Any, in_dims: tuple, *inputs: Any) -> Any:
        missing = (None,) * (count - len(inputs))  # at their defaults
        inputs, in_dims, size = (*inputs, *missing), (*in_dims, *missing), info.batch_size
        _refuse_batched(("cu_seqlens", "seq_idx"), in_dims[count - 2 : count])
        rows = zip(inputs[: len(axes)], in_dims[: len(axes)], axes, strict=True)
        folded = [_fold(x, dim, size, axis) for x, dim, axis in rows]
        output = operator(*folded, *inputs[len(axes) :])
        if isinstance(output, Tensor):
            return _unfold(output, size, results[0])
        unfolded = [_unfold(x, size, axis) for x, axis in zip(output, results, strict=True)]
        return tuple(zip(*unfolded, strict=True))

    torch.library.register_vmap(operator, rule)


_register_vmap(forward, (), (-1,))
_register_vmap(forward_with_state, (), (-1, -1))
_register_vmap(backward, (-1, -1), _CHANNELS)


@torch.library.register_vmap(step)
def _(info: Any, in_dims: tuple, *inputs: Any) -> Any:
    size, rest, state = info.batch_size, inputs[4:], inputs[3]
    _refuse_batched(("slots", "cache_seqlens"), (*in_dims[4:6], None, None)[:2])
    if in_dims[3] is None:
        raise ValueError(
            "tfla: the state is not batched by vmap; each call updates one of its own, so give it that axis"
        )
    rows = zip(inputs[:4], in_dims[:4], _CHANNELS, strict=True)
    *given, folded = (_fold(x, dim, size, axis) for x, dim, axis in rows)
    assert folded is not None
    y = step(*given, folded, *rest)
    if folded.data_ptr() != state.data_ptr():
        back, axis = _unfold(folded, size, -1)
        state.copy_(back.movedim(axis or 0, in_dims[3]))
    return _unfold(y, size, -1)
