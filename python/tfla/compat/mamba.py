"""Mamba-2's state space dual with the signature of mamba_ssm's mamba_chunk_scan_combined.

S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T, y_t = S_t^T C_t: the mLSTM without a denominator, with q = C, k = B, v = x,
log forget gate dt A and log input gate log dt.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tfla

__all__ = ["mamba_chunk_scan_combined"]

# dt of exactly 0 has a logarithm, and a gradient, with this in it; it is below the last digit of any other dt.
_TINY = 1e-30


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """out (B,T,H,P), then the final states (B,H,P,N) and the states of every packed sequence, where asked for.

    Args:
        x: (B,T,H,P), the values.
        dt: (B,T,H); A: (H), negative; dt_bias: (H). dt becomes softplus(dt + dt_bias), if dt_softplus, within dt_limit.
        B, C: (B,T,G,N), shared by H / G heads each, in the dtype of x.
        chunk_size: spacing of stored states; any number.
        D: (H) or (H,P): out += D x. z: (B,T,H,P): out *= silu(z).
        initial_states: (B,H,P,N); with cu_seqlens one per sequence.
        seq_idx: (B,T): the state starts afresh where the number changes. An initial state belongs to sequence 0.
        cu_seqlens: (S+1), with a batch of 1: sequences packed one after another; here also without seq_idx.
        state_dtype: of the returned states. Default: float32, or float64 where x is.
    """
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("tfla: return_varlen_states is True without cu_seqlens, which says where sequences end")
    if seq_idx is not None and cu_seqlens is not None and initial_states is not None:
        raise ValueError("tfla: initial_states is given with both seq_idx and cu_seqlens; leave seq_idx out")
    if dt_limit[0] < 0:
        raise ValueError(f"tfla: dt_limit is {dt_limit}; it must begin at 0 or above, since dt is a weight")
    _check_shapes(x, dt, A, B, D, z, dt_bias, seq_idx)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dt = dt.to(wide)
    if dt_bias is not None:
        dt = dt + dt_bias.to(wide)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(min=dt_limit[0], max=dt_limit[1])
    log_decay = dt * A.to(wide)
    if seq_idx is not None:
        before = F.pad(seq_idx, (1, 0))[:, :-1]
        log_decay = log_decay.masked_fill((seq_idx != before).unsqueeze(-1), float("-inf"))
    state = None
    if initial_states is not None:
        first = initial_states.transpose(-1, -2).to(wide).contiguous()
        state = (first, first.new_zeros(first.shape[:-1]), first.new_zeros(first.shape[:-2]))
    with_state = return_final_states or return_varlen_states
    scan = partial(
        tfla.mlstm, C, B, x, torch.log(dt + _TINY), log_decay, gate="log", qk_scale=1.0, initial_state=state,
        cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip
    out, last = scan(output_final_state=True) if with_state else (scan(), None)
    if D is not None:
        out = out + x.to(wide) * (D if D.dim() == 2 else D.unsqueeze(-1))
    if z is not None:
        out = out * F.silu(z.to(wide))
    out = out.to(x.dtype)
    if last is None:
        return out
    states = last.C.transpose(-1, -2)
    states = states if state_dtype is None else states.to(state_dtype)
    wanted = (states if cu_seqlens is None else states[-1:],) if return_final_states else ()
    return (out, *wanted, states) if return_varlen_states else (out, *wanted)


def _check_shapes(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, D: Tensor | None, z: Tensor | None,
                  dt_bias: Tensor | None, seq_idx: Tensor | None) -> None:  # fmt: skip
    """What would otherwise be broadcast, or be refused under another name."""
    if x.dim() != 4:
        raise ValueError(f"tfla: x has shape {tuple(x.shape)}; it must be (B,T,H,P)")
    heads = x.shape[2]
    accepted: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "dt": (dt, [x.shape[:3]]),
        "A": (A, [(heads,)]),
        "D": (D, [(heads,), (heads, x.shape[3])]),
        "z": (z, [x.shape]),
        "dt_bias": (dt_bias, [(heads,)]),
        "seq_idx": (seq_idx, [x.shape[:2]]),
    }
    for name, (tensor, shapes) in accepted.items():
        if tensor is not None and tensor.shape not in [torch.Size(shape) for shape in shapes]:
            words = " or ".join(str(tuple(shape)) for shape in shapes)
            raise ValueError(f"tfla: {name} has shape {tuple(tensor.shape)}; it must be {words}")
    if B.dim() != 4 or B.shape[:2] != x.shape[:2]:
        raise ValueError(f"tfla: B has shape {tuple(B.shape)}; it must be (B,T,G,N) with the B and T of x")
