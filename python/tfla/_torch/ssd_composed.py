"""Mamba-2's state space dual by way of the mLSTM: q = C, k = B, v = x, log forget gate dt A, log input gate log dt, no
denominator. The path of tensors for which there is no kernel of its own. Arguments are checked by tfla.ssd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.ops import mlstm, mlstm_step

# dt of exactly 0 has a logarithm, and a gradient, with this in it; it is below the last digit of any other dt.
_TINY = 1e-30


def sequence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], initial_state: Tensor | None, output_final_state: bool,
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y, and the state (N,H,P,N) where asked for."""
    values = x
    if cu_seqlens is not None:  # what lies behind the last sequence, NaN too, has no part in rows and sums
        inside = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1:]
        dt = _with_rows_of(inside, dt)
        values = x if D is None else _with_rows_of(inside, x)
        z = None if z is None else _with_rows_of(inside, z)
    dt = _effective(dt, dt_bias, dt_softplus, dt_limit, _wide(x))
    log_decay = dt * A.to(dt.dtype)
    if seq_idx is not None:
        before = F.pad(seq_idx, (1, 0))[:, :-1]
        log_decay = log_decay.masked_fill((seq_idx != before).unsqueeze(-1), float("-inf"))
    state = None
    if initial_state is not None:
        S = initial_state.transpose(-1, -2).to(dt.dtype).contiguous()
        state = (S, S.new_zeros(S.shape[:-1]), S.new_zeros(S.shape[:-2]))
    inputs = (C, B, x, torch.log(dt + _TINY), log_decay)
    if not output_final_state:
        h = mlstm(*inputs, gate="log", qk_scale=1.0, initial_state=state, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
        return _finished(h, values, D, z), None
    h, last = mlstm(
        *inputs, gate="log", qk_scale=1.0, initial_state=state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
        output_final_state=True,
    )  # fmt: skip
    return _finished(h, values, D, z), last.C.transpose(-1, -2)


def step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], slots: Tensor | None,
) -> Tensor:  # fmt: skip
    """y; the state, or its rows `slots`, in place."""
    dt = _effective(dt, dt_bias, dt_softplus, dt_limit, _wide(x))
    before = state if slots is None else state[slots.long().clamp(min=0)]
    # A copy always: the state's axes are the other way round, and its dtype may be another.
    S = before.transpose(-1, -2).to(dt.dtype, copy=True, memory_format=torch.contiguous_format)
    own = (S, S.new_zeros(S.shape[:-1]), S.new_zeros(S.shape[:-2]))
    h = mlstm_step(C, B, x, torch.log(dt + _TINY), dt * A.to(dt.dtype), own, gate="log", qk_scale=1.0)
    y, after = _finished(h, x, D, z), S.transpose(-1, -2).to(state.dtype)
    if slots is None:
        state.copy_(after)
        return y
    in_use = slots >= 0
    _write(state, slots.long(), in_use, before, after)
    return y.masked_fill(~in_use.view(-1, *(1,) * (y.dim() - 1)), 0)


def _write(state: Tensor, slots: Tensor, in_use: Tensor, before: Tensor, after: Tensor) -> None:
    """Rows that are padding write what the first row in use writes, to the same slot: shapes depend on no data, and a
    GPU is not waited for. With no row in use slot 0 is given what it has."""
    row = torch.arange(len(slots), device=slots.device)
    row = torch.where(in_use, row, in_use.to(torch.int8).argmax())
    state[slots.clamp(min=0)[row]] = torch.where(in_use.view(-1, 1, 1, 1), after, before)[row]


def _wide(x: Tensor) -> torch.dtype:
    """Of gates and states."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _effective(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], wide: torch.dtype
) -> Tensor:
    dt = dt.to(wide)
    if dt_bias is not None:
        dt = dt + dt_bias.to(wide)
    if dt_softplus:
        dt = F.softplus(dt)
    return dt.clamp(min=dt_limit[0], max=dt_limit[1])


def _with_rows_of(inside: Tensor, t: Tensor) -> Tensor:
    """Other tokens of (1,T,...) are 0."""
    return t.masked_fill(~inside.view(1, -1, *(1,) * (t.dim() - 2)), 0)


def _finished(h: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(h + D x) silu(z)."""
    if D is not None:
        h = h + x.to(_wide(x)) * (D if D.dim() == 2 else D.unsqueeze(-1))
    if z is not None:
        h = h * F.silu(z.to(_wide(x)))
    return h.to(x.dtype)
