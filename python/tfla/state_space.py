"""Mamba-2's state space dual for PyTorch: whole sequences, and the step for decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from tfla._torch import ssd as fused
from tfla._torch import ssd_composed
from tfla._torch.autocast import autocast
from tfla._torch.fast_path import any_autocast
from tfla._torch.transforms import transformed, transforms_active

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ssd", "ssd_step"]

Limit = tuple[float, float]
NO_LIMIT: Limit = (0.0, float("inf"))


class _Options(TypedDict, total=False):
    """Those of `ssd`, for who checks types."""

    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    dt_limit: Limit
    initial_state: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None
    chunk_size: int | None


@overload
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    output_final_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Limit = NO_LIMIT,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's recurrence over whole sequences, chunkwise: linear in T, parallel inside a chunk.

        S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T    y_t = (S_t C_t + D x_t) * silu(z_t)

    Args:
        x: (B,T,H,P) float32, float64, bfloat16 or float16. Any strides with a contiguous last axis.
        dt: (B,T,H) any float dtype: how far a token moves time on, and how much of it is written.
        A: (H) any float dtype, usually below 0: the log decay is dt A.
        B, C: (B,T,G,N) in the dtype of x. H is a multiple of G: head h reads group h // (H // G).
        D: (H) or (H,P) any float dtype: what goes past the state. None is 0.
        z: (B,T,H,P) any float dtype: the output gate silu(z). None is no gate.
        dt_bias: (H) any float dtype, added to dt first.
        dt_softplus: dt becomes softplus(dt + dt_bias).
        dt_limit: what dt is clamped to then; it begins at 0 or above.
        initial_state: S (sequences,H,P,N), any float dtype; one for each row, or for each sequence of cu_seqlens.
        output_final_state: also return the state after the last token, with gradients through it.
        seq_idx: (B,T) integers: the state starts afresh where the number changes. An initial state belongs to number 0.
        cu_seqlens: (sequences+1) int32 or int64, any stride, 0 = c_0 <= ... <= T: sequences packed into one row (then
            B = 1). Tokens behind the last are padding: their rows of y and of all gradients are 0.
        chunk_size: spacing of the states that backward stores; it trades memory for time and changes results by
            rounding only. None lets the plan choose.

    Returns:
        y, shaped as x, in its dtype; with output_final_state the pair (y, S), S float32, or float64 where x is.

    Raises:
        ValueError: an argument is not as described; the sentence names it. RuntimeError: this build or machine cannot
            run the call, or a second derivative was asked for.
    """
    if is_compiling() or any_autocast():
        x, B, C = autocast(x, B, C)
    _check_tensors(x, dt, A, B, C, D, z, dt_bias, dt_limit, step=False)
    _check_sequences(x, B, initial_state, seq_idx, cu_seqlens)
    sequence = fused.sequence if _has_kernels(x) else ssd_composed.sequence
    y, state = sequence(
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_state, output_final_state, seq_idx, cu_seqlens,
        chunk_size,
    )  # fmt: skip
    return y if state is None else (y, state)


def ssd_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Limit = NO_LIMIT,
    slots: Tensor | None = None,
) -> Tensor:
    """One token, or a few, on states that are updated in place.

    Args:
        x: (B,H,P) for one token, or (B,T,H,P) for T of them; z the same.
        dt: (B,H), or (B,T,H).
        B, C: (B,G,N), or (B,T,G,N), in the dtype of x.
        state: S (sequences,H,P,N), any float dtype; overwritten by the states after the last token.
        slots: (B) int32 or int64, any stride: row b works on state slots[b] of a pool, each slot at most once. A row
            with slot -1 is padding: it has no state, and its y is 0. None: row b on state b. On a GPU slots are not
            checked.
        A, D, dt_bias, dt_softplus, dt_limit: as in `ssd`.

    Returns:
        y, shaped as x, in its dtype. It has no gradient: call under torch.no_grad() or torch.inference_mode().
    """
    tensors = (x, dt, A, B, C, state, D, z, dt_bias)
    if is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        raise RuntimeError(
            "tfla: ssd_step was given a tensor that requires a gradient, and has none; "
            "call it under torch.no_grad(), or use ssd with initial_state"
        )
    if is_compiling() or any_autocast():
        x, B, C = autocast(x, B, C)
    _check_tensors(x, dt, A, B, C, D, z, dt_bias, dt_limit, step=True)
    _check_state(x, B, state, slots)
    if not (_has_kernels(x) and fused.takes_state(x, state)):
        return ssd_composed.step(x, dt, A, B, C, state, D, z, dt_bias, dt_softplus, dt_limit, slots)
    y = fused.run_step(x, dt, A, B, C, state, D, z, dt_bias, dt_softplus, dt_limit, slots)
    if not is_compiling():
        increment_version(state)  # a graph that has saved the state must not go on from the new one
    return y


def _has_kernels(x: Tensor) -> bool:
    """Whether there are kernels of the operator for this call; others are composed of the mLSTM's."""
    return x.device.type == "cpu" and (is_compiling() or not transformed())


def _check_tensors(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_limit: Limit, step: bool,
) -> None:  # fmt: skip
    """What would otherwise be broadcast, or be refused under another name."""
    if x.dim() != 4 and not (step and x.dim() == 3):
        words = "(B,H,P) or (B,T,H,P)" if step else "(B,T,H,P)"
        raise ValueError(f"tfla: x has shape {tuple(x.shape)}; it must be {words}")
    *rows, heads, dim = x.shape
    accepted: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "dt": (dt, [(*rows, heads)]),
        "A": (A, [(heads,)]),
        "D": (D, [(heads,), (heads, dim)]),
        "z": (z, [(*rows, heads, dim)]),
        "dt_bias": (dt_bias, [(heads,)]),
    }
    for name, (tensor, shapes) in accepted.items():
        if tensor is None:
            continue
        if tensor.shape not in [torch.Size(shape) for shape in shapes]:
            words = " or ".join(str(shape) for shape in shapes)
            raise ValueError(f"tfla: {name} has shape {tuple(tensor.shape)}; it must be {words}")
        if not tensor.is_floating_point():
            raise ValueError(f"tfla: {name} is {tensor.dtype}; it must be of a float dtype")
    if B.dim() != x.dim() or B.shape[:-2] != x.shape[:-2] or B.shape[-2] < 1 or heads % B.shape[-2]:
        axes = ",".join(str(size) for size in rows)
        raise ValueError(f"tfla: B has shape {tuple(B.shape)}; it must be ({axes},G,N), G a divisor of H = {heads}")
    if C.shape != B.shape:
        raise ValueError(f"tfla: C has shape {tuple(C.shape)}; it must be {tuple(B.shape)}, that of B")
    for name, tensor in (("B", B), ("C", C)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"tfla: {name} is {tensor.dtype}; it must be {x.dtype}, the dtype of x")
    if not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"tfla: dt_limit is {dt_limit}; it must rise from 0 or above, since dt is a weight")


def _check_sequences(
    x: Tensor, B: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    if seq_idx is not None and seq_idx.shape != x.shape[:2]:
        raise ValueError(f"tfla: seq_idx has shape {tuple(seq_idx.shape)}; it must be {tuple(x.shape[:2])}")
    if seq_idx is not None and (seq_idx.is_floating_point() or seq_idx.is_complex()):
        raise ValueError(f"tfla: seq_idx is {seq_idx.dtype}; it must be of an integer dtype")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0):
        raise ValueError(f"tfla: cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (sequences+1,)")
    if initial_state is None:
        return
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("tfla: initial_state is given with both seq_idx and cu_seqlens; leave seq_idx out")
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _check_shape_of_state("initial_state", initial_state, sequences, x, B)


def _check_state(x: Tensor, B: Tensor, state: Tensor, slots: Tensor | None) -> None:
    _check_shape_of_state("state", state, x.shape[0] if slots is None else state.shape[0], x, B)
    if slots is None:
        return
    if slots.shape != x.shape[:1] or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"tfla: slots has shape {tuple(slots.shape)} and is {slots.dtype}; it must be ({x.shape[0]},), of int32 or "
            "int64"
        )
    if slots.device.type != "cpu" or is_compiling() or transforms_active():
        return
    given = slots[slots != -1].tolist()
    if not all(0 <= slot < state.shape[0] for slot in given):
        raise ValueError(
            f"tfla: slots is {slots.tolist()}; each must be -1 or below {state.shape[0]}, the states' number"
        )
    if len(set(given)) != len(given):
        raise ValueError(f"tfla: slots is {slots.tolist()}; each slot may be given once")


def _check_shape_of_state(name: str, state: Tensor, sequences: int, x: Tensor, B: Tensor) -> None:
    shape = (sequences, *x.shape[-2:], B.shape[-1])
    if state.shape != shape:
        raise ValueError(f"tfla: {name} has shape {tuple(state.shape)}; it must be {shape}")
    if not state.is_floating_point():
        raise ValueError(f"tfla: {name} is {state.dtype}; it must be of a float dtype")
