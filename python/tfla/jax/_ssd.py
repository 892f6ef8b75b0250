"""The state space dual of Mamba-2 for JAX, by way of the mLSTM: q = C, k = B, v = x, log forget gate dt A, log input
gate log dt, no denominator. XLA fuses what is around it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax._mlstm import mlstm, mlstm_step

Limit = tuple[float, float]
NO_LIMIT: Limit = (0.0, float("inf"))

# dt of exactly 0 has a logarithm, and a gradient, with this in it; it is below the last digit of any other dt.
_TINY = 1e-30


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: Limit = NO_LIMIT,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    seq_idx: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
) -> Array | tuple[Array, Array]:
    """Mamba-2's recurrence over whole sequences, linear in T; differentiable in all that is a float.

        S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T    y_t = (S_t C_t + D x_t) * silu(z_t)

    Arguments, defaults and results are those of `tfla.ssd`.

    Args:
      x: (B,T,H,P), float32, float64, bfloat16 or float16.
      dt: (B,T,H), any float dtype; dt_bias: (H,). dt becomes softplus(dt + dt_bias), if dt_softplus, within dt_limit.
      A: (H,), any float dtype, usually below 0.
      B, C: (B,T,G,N), dtype of x; H is a multiple of G.
      D: (H,) or (H,P). z: (B,T,H,P).
      initial_state: S (sequences,H,P,N) to start from, any float dtype. Default: zeros.
      output_final_state: return the last state too: float32, or float64 where x is.
      seq_idx: (B,T), integers: the state starts afresh where the number changes; before the first token it is 0.
      cu_seqlens: (sequences+1,) int32 or int64: packed sequences; then B = 1. Rows of y behind the last are 0.
      chunk_size: spacing of the states that backward stores. Default: chosen from the shapes.

    Returns:
      y (B,T,H,P) in the dtype of x, or (y, S) with output_final_state.
    """
    _check(x, dt, A, B, C, D, z, dt_bias, dt_limit)
    values = x
    if cu_seqlens is not None:  # what lies behind the last sequence, NaN too, has no part in rows and sums
        inside = (jnp.arange(x.shape[1]) < cu_seqlens[-1])[None, :, None, None]
        dt, values = jnp.where(inside[..., 0], dt, 0), jnp.where(inside, x, 0)
        z = None if z is None else jnp.where(inside, z, 0)
    if seq_idx is not None and (seq_idx.shape != x.shape[:2] or not jnp.issubdtype(seq_idx.dtype, jnp.integer)):
        raise ValueError(
            f"tfla: seq_idx has shape {seq_idx.shape} and is {seq_idx.dtype}; it must be {x.shape[:2]}, of integers"
        )
    dt = _effective(dt, dt_bias, dt_softplus, dt_limit, x)
    log_decay = dt * A.astype(dt.dtype)
    if seq_idx is not None:
        before = jnp.pad(seq_idx, ((0, 0), (1, 0)))[:, :-1]
        log_decay = jnp.where((seq_idx != before)[..., None], -jnp.inf, log_decay)
    state = None
    if initial_state is not None:
        if seq_idx is not None and cu_seqlens is not None:
            raise ValueError("tfla: initial_state is given with both seq_idx and cu_seqlens; leave seq_idx out")
        _check_state("initial_state", initial_state, x, B)
        state = _mlstm_state(initial_state, dt.dtype)
    options: dict[str, Any] = {"gate": "log", "qk_scale": 1.0, "cu_seqlens": cu_seqlens, "chunk_size": chunk_size}
    h, last = mlstm(C, B, x, jnp.log(dt + _TINY), log_decay, initial_state=state, output_final_state=True, **options)
    y = _finished(h, values, D, z)
    return (y, jnp.swapaxes(last.C, 2, 3)) if output_final_state else y


def ssd_step(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    state: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: Limit = NO_LIMIT,
) -> tuple[Array, Array]:
    """One token, or a few, on a state (B,H,P,N): y and the state after them, in its dtype. Not differentiable.

    Shapes are those of `ssd`; for one token the axis T may be left out: x (B,H,P), dt (B,H), B, C (B,G,N).
    """
    _check(x, dt, A, B, C, D, z, dt_bias, dt_limit)
    _check_state("state", state, x, B)
    dt = _effective(dt, dt_bias, dt_softplus, dt_limit, x)
    own = _mlstm_state(state, dt.dtype)
    h, after = mlstm_step(C, B, x, jnp.log(dt + _TINY), dt * A.astype(dt.dtype), own, gate="log", qk_scale=1.0)
    return _finished(h, x, D, z), jnp.swapaxes(after.C, 2, 3).astype(state.dtype)


def _mlstm_state(S: Array, dtype: Any) -> tuple[Array, Array, Array]:
    C = jnp.swapaxes(S, 2, 3).astype(dtype)
    return C, jnp.zeros(C.shape[:3], dtype), jnp.zeros(C.shape[:2], dtype)


def _effective(dt: Array, dt_bias: Array | None, dt_softplus: bool, dt_limit: Limit, x: Array) -> Array:
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    dt = dt.astype(wide) if dt_bias is None else dt.astype(wide) + dt_bias.astype(wide)
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    least, most = dt_limit
    # And not jnp.clip, whose slope at a limit itself, such as a dt of 0, is one half.
    return jnp.where(dt < least, least, jnp.where(dt > most, most, dt))


def _finished(h: Array, x: Array, D: Array | None, z: Array | None) -> Array:
    """(h + D x) silu(z)."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    y = h.astype(wide)
    if D is not None:
        y = y + x.astype(wide) * (D if D.ndim == 2 else D[:, None]).astype(wide)
    if z is not None:
        y = y * jax.nn.silu(z.astype(wide))
    return y.astype(x.dtype)


def _check(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None, z: Array | None, dt_bias: Array | None,
    dt_limit: Limit,
) -> None:  # fmt: skip
    """What would otherwise be broadcast, or be refused under another name."""
    if x.ndim not in (3, 4):
        raise ValueError(f"tfla: x has shape {x.shape}; it must be (B,T,H,P), or (B,H,P) for one token of a step")
    *rows, heads, dim = x.shape
    accepted: dict[str, tuple[Array | None, list[tuple[int, ...]]]] = {
        "dt": (dt, [(*rows, heads)]),
        "A": (A, [(heads,)]),
        "D": (D, [(heads,), (heads, dim)]),
        "z": (z, [(*rows, heads, dim)]),
        "dt_bias": (dt_bias, [(heads,)]),
    }
    for name, (array, shapes) in accepted.items():
        if array is not None and array.shape not in shapes:
            raise ValueError(f"tfla: {name} has shape {array.shape}; it must be {' or '.join(map(str, shapes))}")
    if B.ndim != x.ndim or B.shape[:-2] != x.shape[:-2] or B.shape[-2] < 1 or heads % B.shape[-2]:
        axes = ",".join(map(str, rows))
        raise ValueError(f"tfla: B has shape {B.shape}; it must be ({axes},G,N), G a divisor of H = {heads}")
    if C.shape != B.shape:
        raise ValueError(f"tfla: C has shape {C.shape}; it must be {B.shape}, that of B")
    for name, array in (("B", B), ("C", C)):
        if array.dtype != x.dtype:
            raise ValueError(f"tfla: {name} is {array.dtype}; it must be {x.dtype}, the dtype of x")
    if not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"tfla: dt_limit is {dt_limit}; it must rise from 0 or above, since dt is a weight")


def _check_state(name: str, state: Array, x: Array, B: Array) -> None:
    if state.ndim != 4 or state.shape[1:] != (*x.shape[-2:], B.shape[-1]):
        dims = ",".join(map(str, (*x.shape[-2:], B.shape[-1])))
        raise ValueError(f"tfla: {name} has shape {state.shape}; it must be (sequences,{dims})")
