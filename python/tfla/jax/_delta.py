"""The delta rule for JAX."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla._options import DELTA, Layout, Write
from tfla.jax import _ffi

_DEFAULTS = DELTA.defaults


class _Inputs(NamedTuple):
    """The arrays of a call in the order of its arguments; where: cu_seqlens, or slots."""

    q: Array
    k: Array
    v: Array
    beta: Array
    g: Array | None
    A_log: Array | None
    dt_bias: Array | None
    state: Array | None
    where: Array | None

    def given(self) -> list[Array]:
        return [x for x in self if x is not None]

    def flags(self, options: _ffi.Options, *, C: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """C: whether the last state, or its gradient, is among the arrays too."""
        there = {name: getattr(self, name) is not None for name in ("g", "A_log", "dt_bias", "state")}
        return options.encode(**there, index=self.where is not None, C=C)

    def names(self, **public: str) -> list[str]:
        """As callers know the arrays that are given."""
        return [public.get(name, name) for name, x in self._asdict().items() if x is not None]


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    g: Array | None = None,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    write: Write = _DEFAULTS.write,
    normalize_qk: bool = _DEFAULTS.normalize_qk,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = _DEFAULTS.chunk_size,
    qk_scale: float | None = _DEFAULTS.qk_scale,
    layout: Layout = _DEFAULTS.layout,
) -> Array | tuple[Array, Array]:
    """The delta rule over whole sequences, linear in T; differentiable in all that is a float.

        C_t = exp(g_t) C_{t-1} + beta_t k_t r_t^T    r_t = v_t - exp(g_t) C_{t-1}^T k_t    h_t = C_t^T (scale q_t)

    Arguments, defaults and results are those of `tfla.delta_rule`.

    Args:
      q, k: (B,T,Hqk,dqk), float32, float64, bfloat16 or float16.
      v: (B,T,H,dhv), dtype of q; H is a multiple of Hqk.
      beta: (B,T,H), any float dtype: how much of the residual r is written.
      g: (B,T,H), any float dtype: log decay. Default: no decay.
      A_log, dt_bias: (H,), any float dtype: with A_log the log decay is -exp(A_log) * softplus(g + dt_bias).
      write: "plain": beta as it is; "sigmoid": sigmoid(beta); "twice_sigmoid": 2 * sigmoid(beta).
      normalize_qk: q and k become x / sqrt(|x|^2 + 1e-6) first.
      initial_state: C (N,H,dqk,dhv) to start from; float32, or float64 where q is. Default: zeros.
      output_final_state: return the last state too.
      cu_seqlens: (N+1,) int32 or int64: sequence s is the tokens from cu_seqlens[s] to cu_seqlens[s+1]; then B = 1.
        Tokens from the last one on are padding: their rows of h and of all gradients are 0.
      chunk_size: spacing of the states that backward stores. Default: chosen from the shapes.
      qk_scale: of q. Default: dqk ** -0.5.
      layout: "bthd" as above, or "bhtd" for (B,H,T,D) and gates (B,H,T).

    Returns:
      h (B,T,H,dhv) in the dtype of q, or (h, C) with output_final_state.
    """
    options = _ffi.DELTA.parse(write, normalize_qk, layout, qk_scale, chunk_size)
    inputs = _ffi.vary_alike(_Inputs(q, k, v, beta, g, A_log, dt_bias, initial_state, cu_seqlens))
    names = inputs.names(state="initial_state", where="cu_seqlens")
    _ffi.DELTA.check(_ffi.FORWARD, names, inputs.given(), *inputs.flags(options))
    h, last = _delta_rule(options, bool(output_final_state), inputs)
    return (h, *last) if output_final_state else h


def delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    g: Array | None = None,
    state: Array | None = None,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    write: Write = _DEFAULTS.write,
    normalize_qk: bool = _DEFAULTS.normalize_qk,
    slots: Array | None = None,
    qk_scale: float | None = _DEFAULTS.qk_scale,
    layout: Layout = _DEFAULTS.layout,
) -> tuple[Array, Array]:
    """One token, or a few, on a state, which must be given: h and the state after them. Not differentiable.

    Shapes are those of `delta_rule`; for one token the axis T may be left out: q, k (B,Hqk,dqk), v, h (B,H,dhv), and
    beta, g (B,H). Under `jax.jit(..., donate_argnames="state")` the state is updated in place, without a copy. With
    slots (B,), int32 or int64 and all different, state holds S states and row b of the batch uses number slots[b]; the
    others stay as they are.
    """
    options = _ffi.DELTA.parse(write, normalize_qk, layout, qk_scale)
    if state is None:
        raise ValueError("tfla: state is missing; delta_rule_step needs the C that it is to update")
    inputs = _ffi.vary_alike(_Inputs(q, k, v, beta, g, A_log, dt_bias, state, slots))
    one_token, axis = inputs.q.ndim == 3, 2 if options["head_first"] else 1
    if one_token:
        tokens = {name: getattr(inputs, name) for name in ("q", "k", "v", "beta", "g")}
        inputs = inputs._replace(
            **{name: jnp.expand_dims(x, min(axis, x.ndim)) for name, x in tokens.items() if x is not None}
        )
    flags: tuple[np.ndarray, np.ndarray] = inputs.flags(options)
    given = inputs.given()
    _ffi.DELTA.check(_ffi.STEP, inputs.names(where="slots"), given, *flags)
    results = [_ffi.like(inputs.v), _ffi.like(inputs.state)]
    before = inputs._replace(state=None, where=None).given()
    h, after = _ffi.DELTA.call(_ffi.STEP, results, given, *flags, aliases={len(before): 1})
    return jnp.squeeze(h, axis) if one_token else h, after


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(options, output_final_state, inputs):
    """h, and a tuple that holds the last state where that is asked for."""
    last = _ffi.last_state(options, inputs.q, inputs.v, inputs.where)[: int(output_final_state)]
    flags = inputs.flags(options, C=output_final_state)
    h, *others = _ffi.DELTA.call(_ffi.FORWARD, [_ffi.like(inputs.v), *last], inputs.given(), *flags)
    return h, tuple(others)


def _forward(options, output_final_state, inputs):
    return _delta_rule(options, output_final_state, inputs), inputs


def _backward(options, output_final_state, inputs, cotangents):
    dh, dlast = cotangents
    before = inputs._replace(state=None, where=None).given()
    after = [x for x in (inputs.state, inputs.where) if x is not None]
    results = [_ffi.like(x) for x in inputs._replace(where=None).given()]
    flags = inputs.flags(options, C=output_final_state)
    grads = iter(_ffi.DELTA.call(_ffi.BACKWARD, results, [*before, dh, *dlast, *after], *flags))
    none = None if inputs.where is None else np.zeros(inputs.where.shape, jax.dtypes.float0)
    return (_Inputs(*(None if x is None else next(grads) for x in inputs[:-1]), none),)


_delta_rule.defvjp(_forward, _backward)
