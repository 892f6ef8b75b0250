"""The mLSTM for JAX."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla._options import DEFAULTS, Gate, Keep, Layout, Normalizer
from tfla.jax import _ffi

_INPUTS = ("q", "k", "v", "i", "f")
_STATE = ("C", "n", "m")


class State(NamedTuple):
    """The stabilised state of N sequences: the true C is C * exp(m), the true n is n * exp(m)."""

    C: Array  # (N,H,dqk,dhv)
    n: Array  # (N,H,dqk)
    m: Array  # (N,H)


def mlstm(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    *,
    gate: Gate = DEFAULTS.gate,
    normalizer: Normalizer | None = DEFAULTS.normalizer,
    initial_state: tuple[Array, Array, Array] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = DEFAULTS.chunk_size,
    qk_scale: float | None = DEFAULTS.qk_scale,
    eps: float = DEFAULTS.eps,
    soft_cap: float | None = DEFAULTS.soft_cap,
    layout: Layout = DEFAULTS.layout,
    exact_normalizer_grad: bool = DEFAULTS.exact_normalizer_grad,
    keep: Keep = DEFAULTS.keep,
) -> Array | tuple[Array, State]:
    """The mLSTM over whole sequences, linear in T; differentiable in q, k, v, i, f, and C and n of the initial state.

    Axes: B batch, T tokens, H heads, Hqk query/key heads (H is a multiple of Hqk), dqk and dhv head dimensions, N
    sequences (B, or those of cu_seqlens). Arguments, defaults and results are those of `tfla.mlstm`.

    Args:
      q, k: (B,T,Hqk,dqk), float32, float64, bfloat16 or float16.
      v: (B,T,H,dhv), dtype of q.
      i, f: (B,T,H), any float dtype: input and forget gate.
      gate: "exp": log i = i; "sigmoid": log i = log sigmoid(i), both with log f = log sigmoid(f); "log": i and f are
        log i and log f themselves.
      normalizer: "max": the denominator is max(|q.n|, exp(-m)) + eps; "none": 1. Default: "max" for "exp", else "none".
      initial_state: (C, n, m) to start from; float32, or float64 where q is. Default: zeros.
      output_final_state: return the last state too.
      cu_seqlens: (N+1,) int32 or int64: sequence s is the tokens from cu_seqlens[s] to cu_seqlens[s+1]; then B = 1.
        Tokens from the last one on are padding: their rows of h and of all gradients are 0.
      chunk_size: spacing of the states that backward stores. Default: chosen from the shapes.
      qk_scale: of q. Default: dqk ** -0.5.
      eps: added to the denominator.
      soft_cap: gates become cap * tanh(x / cap) first.
      layout: "bthd" as above, or "bhtd" for (B,H,T,D) and gates (B,H,T).
      exact_normalizer_grad: differentiate through the denominator, which the paper holds constant.
      keep: "denominators" or "states": what forward leaves for backward on a GPU, as in `tfla.mlstm`.

    Returns:
      h (B,T,H,dhv) in the dtype of q, or (h, State) with output_final_state.
    """
    options = _ffi.MLSTM.parse(
        gate, normalizer, layout, eps, qk_scale, soft_cap, exact_normalizer_grad, chunk_size, keep
    )
    arrays, state, index = _vary_alike([q, k, v, i, f], initial_state, cu_seqlens)
    flags = options.encode(state=state is not None, index=index is not None, C=bool(output_final_state))
    names = [*_INPUTS, *(f"initial_state.{x}" for x in _STATE if state), *(["cu_seqlens"] if index is not None else [])]
    _ffi.MLSTM.check(_ffi.FORWARD, names, _flat(arrays, state, index), *flags)
    h, last = _mlstm(options, bool(output_final_state), arrays, state, index)
    return (h, State(*last)) if output_final_state else h


def mlstm_step(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    state: tuple[Array, Array, Array],
    *,
    slots: Array | None = None,
    gate: Gate = DEFAULTS.gate,
    normalizer: Normalizer | None = DEFAULTS.normalizer,
    qk_scale: float | None = DEFAULTS.qk_scale,
    eps: float = DEFAULTS.eps,
    soft_cap: float | None = DEFAULTS.soft_cap,
    layout: Layout = DEFAULTS.layout,
) -> tuple[Array, State]:
    """One token, or a few, on a state: h and the state after them. Not differentiable; `mlstm` is.

    Shapes are those of `mlstm`; for one token the axis T may be left out: q, k (B,Hqk,dqk), v, h (B,H,dhv), i, f (B,H).
    Under `jax.jit(..., donate_argnames="state")` the state is updated in place, without a copy. With slots (B,), int32
    or int64 and all different, state holds S states and row b of the batch uses number slots[b]; the others stay as
    they are.
    """
    options = _ffi.MLSTM.parse(gate, normalizer, layout, eps, qk_scale, soft_cap)
    arrays, before, index = _vary_alike([q, k, v, i, f], state, slots)
    one_token, axis = arrays[0].ndim == 3, 2 if options["head_first"] else 1
    if one_token:
        arrays = [jnp.expand_dims(x, min(axis, x.ndim)) for x in arrays]
    if before is None:
        raise ValueError("tfla: state is missing; mlstm_step needs the (C, n, m) it is to update")
    flags = options.encode(state=True, index=index is not None)
    flat = _flat(arrays, before, index)
    names = [*_INPUTS, *(f"state.{x}" for x in _STATE), *(["slots"] if index is not None else [])]
    _ffi.MLSTM.check(_ffi.STEP, names, flat, *flags)
    results = [_ffi.like(arrays[2]), *(_ffi.like(x) for x in before)]
    first = len(_INPUTS)
    h, *after = _ffi.MLSTM.call(_ffi.STEP, results, flat, *flags, aliases={first + part: 1 + part for part in range(3)})
    return jnp.squeeze(h, axis) if one_token else h, State(*after)


def _vary_alike(
    arrays: list, state: tuple | None, index: Array | None
) -> tuple[list[Array], State | None, Array | None]:
    """The arrays, the state as one, and cu_seqlens or slots, as `_ffi.vary_alike` makes them."""
    arrays, state, index = _ffi.vary_alike((list(arrays), None if state is None else tuple(state), index))
    if state is not None and len(state) != len(_STATE):
        raise ValueError(f"tfla: the state has {len(state)} parts; it must be (C, n, m)")
    return arrays, None if state is None else State(*state), index


def _flat(arrays: list[Array], state: State | None, index: Array | None) -> list[Array]:
    return [*arrays, *(state or ()), *(() if index is None else (index,))]


def _saved(options: _ffi.Options, q: Array, v: Array, index: Array | None) -> list[jax.ShapeDtypeStruct]:
    """What forward leaves for backward, if anything, as an array of 32-bit numbers. Which platform will run it is not
    known while tracing: memory is asked for where the default one is a GPU, and used where the call runs on one."""
    if jax.default_backend() != "gpu":
        return []
    tokens, heads = (v.shape[axis] for axis in ((2, 1) if options["head_first"] else (1, 2)))
    sequences = None if index is None else index.shape[0] - 1
    size = _ffi.saved_bytes(options, v.shape[0], tokens, heads, q.shape[3], v.shape[3], q.dtype.name, sequences)
    return [_ffi.like(q, (size // 4,), jnp.int32)] if size > 0 else []


def _run_forward(options, output_final_state, arrays, state, index, *, saved=()):
    """h, the last state, and what is saved for backward: each that is not asked for is empty."""
    flags = options.encode(state=state is not None, index=index is not None, C=output_final_state, saved=len(saved) > 0)
    q, _, v, *_ = arrays
    last = _ffi.last_state(options, q, v, index) if output_final_state else []
    h, *others = _ffi.MLSTM.call(_ffi.FORWARD, [_ffi.like(v), *last, *saved], _flat(arrays, state, index), *flags)
    return h, tuple(others[: len(last)]), tuple(others[len(last) :])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlstm(options, output_final_state, arrays, state, index):
    return _run_forward(options, output_final_state, arrays, state, index)[:2]


def _forward(options, output_final_state, *given):
    (q, _, v, *_), _, index = given
    h, last, saved = _run_forward(options, output_final_state, *given, saved=_saved(options, q, v, index))
    return (h, last), (given, saved)


def _backward(options, output_final_state, residuals, cotangents):
    (arrays, state, index), saved = residuals
    dh, dlast = cotangents
    dlast = dlast[:2]  # m fixes a scale and has no gradient
    flags = options.encode(
        state=state is not None, index=index is not None, C=output_final_state, n=output_final_state,
        saved=len(saved) > 0,
    )  # fmt: skip
    given = [*arrays, dh, *dlast, *(state or ()), *(() if index is None else (index,)), *saved]
    results = [_ffi.like(x) for x in [*arrays, *(state or ())[:2]]]
    grads = _ffi.MLSTM.call(_ffi.BACKWARD, results, given, *flags)
    dstate = None if state is None else State(*grads[5:], jnp.zeros_like(state.m))
    dindex = None if index is None else np.zeros(index.shape, jax.dtypes.float0)
    return list(grads[:5]), dstate, dindex


_mlstm.defvjp(_forward, _backward)
