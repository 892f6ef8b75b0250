"""The operators of bindings/torch_ssd.cc with all that PyTorch must know about them: derivatives and shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from tfla._options import spacing
from tfla._torch import operators  # noqa: F401  (loads the library)
from tfla._torch.derivatives import zeros_for
from tfla._torch.fake import gradient_of, on_one_device, state_dtype
from tfla._torch.transforms import refusal

# Inputs of those for sequences, before their options: x, dt, A, B, C, D, z, dt_bias, S, cu_seqlens, seq_idx. The last
# two have no gradient. Behind the options of all come two of forward alone.
DIFFERENTIABLE, TENSORS, OPTIONS = 9, 11, 4

forward = torch.ops.tfla.ssd.default  # y, S where asked for, y before silu(z) where that is kept
backward = torch.ops.tfla.ssd_backward.default  # dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dS
step = torch.ops.tfla.ssd_step.default  # y; S in place


# ---------------------------------------------------------------- derivatives
def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2], *inputs[:TENSORS])
    ctx.options = inputs[TENSORS : TENSORS + OPTIONS]
    ctx.mark_non_differentiable(output[2])


def _gradients(ctx: Any, dy: Tensor | None, dS: Tensor | None = None, _: Tensor | None = None) -> tuple:
    """Of all inputs."""
    ungated, *inputs = ctx.saved_tensors
    rest = (None,) * (TENSORS - DIFFERENTIABLE + OPTIONS + 2)
    if dy is None:
        if dS is None:
            return (None,) * DIFFERENTIABLE + rest
        dy = zeros_for(inputs[0])
    z = inputs[6]
    if z is None:
        ungated = None
    elif ungated.numel() != z.numel():  # forward was not asked to keep it
        ungated = forward(*inputs[:6], None, *inputs[7:], *ctx.options)[0]
    # Where forward was not asked for the state, its output is an empty tensor, and so is the gradient of that.
    grads = backward(dy, None if dS is None or dS.dim() == 1 else dS, ungated, *inputs, *ctx.options)
    return (*(None if x is None else grad for x, grad in zip(inputs, grads, strict=False)), *rest)


torch.library.register_autograd(forward, _gradients, setup_context=_save)
torch.library.register_autograd(backward, refusal("ssd"), setup_context=lambda ctx, inputs, output: None)


def sequence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], initial_state: Tensor | None, output_final_state: bool,
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y, and the state (sequences,H,P,N) where asked for. tfla.ssd has checked what would mislead here."""
    x, B, C = (_with_rows(tensor) for tensor in (x, B, C))
    state = None if initial_state is None else initial_state.to(state_dtype(x))
    inputs = (x, dt, A, B, C, D, None if z is None else _with_rows(z.to(x.dtype)), dt_bias, state)
    if seq_idx is not None and seq_idx.dtype not in (torch.int32, torch.int64):
        seq_idx = seq_idx.long()
    keep = z is not None and is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    y, last, _ = forward(
        *inputs, cu_seqlens, seq_idx, dt_softplus, *_limits(dt_limit), spacing(chunk_size), output_final_state, keep
    )
    return y, last if output_final_state else None


def takes_state(x: Tensor, state: Tensor) -> bool:
    """Of steps: rows that are contiguous, and float64 where x is and nowhere else."""
    return state.stride(-1) == 1 and (state.dtype == torch.float64) == (x.dtype == torch.float64)


def run_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], slots: Tensor | None,
) -> Tensor:  # fmt: skip
    """y; the state, or its rows `slots`, in place."""
    x, B, C = (_with_rows(tensor) for tensor in (x, B, C))
    z = None if z is None else _with_rows(z.to(x.dtype))
    return step(x, dt, A, B, C, state, D, z, dt_bias, slots, dt_softplus, *_limits(dt_limit))


def _limits(dt_limit: tuple[float, float]) -> tuple[float, float | None]:
    least, most = dt_limit
    return float(least), None if most == float("inf") else float(most)


def _with_rows(x: Tensor) -> Tensor:
    """With a contiguous last axis, as the operators take it: what lies the other way round is copied."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# ---------------------------------------------------------------- shapes, dtypes and devices of results
@torch.library.register_fake(forward)
def _(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, S=None, cu_seqlens=None, seq_idx=None, dt_softplus=False, dt_min=0.0,
    dt_max=None, chunk_size=0, with_state=False, keep=False,
):  # fmt: skip
    on_one_device(x, dt, A, B, C, D, z, dt_bias, S, cu_seqlens, seq_idx)
    empty = x.new_empty(0, dtype=torch.float32)
    states = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    last = x.new_empty((states, *x.shape[2:], B.shape[3]), dtype=state_dtype(x)) if with_state else empty
    ungated = x.new_empty(x.shape) if keep and z is not None else empty.clone()
    return x.new_empty(x.shape), last, ungated


@torch.library.register_fake(backward)
def _(dy, dS, ungated, x, dt, A, B, C, D=None, z=None, dt_bias=None, S=None, cu_seqlens=None, seq_idx=None, *options):
    on_one_device(dy, dS, ungated, x, dt, A, B, C, D, z, dt_bias, S, cu_seqlens, seq_idx)
    return tuple(gradient_of(tensor, x) for tensor in (x, dt, A, B, C, D, z, dt_bias, S))


@torch.library.register_fake(step)
def _(x, dt, A, B, C, S, D=None, z=None, dt_bias=None, slots=None, *options):
    on_one_device(x, dt, A, B, C, S, D, z, dt_bias, slots)
    return x.new_empty(x.shape)
