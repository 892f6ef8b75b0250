"""The delta rule for PyTorch, gated or not (DeltaNet, Gated DeltaNet): whole sequences, and the step for decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor, is_grad_enabled
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from tfla._options import DELTA, Layout, Write
from tfla._torch import delta as operators
from tfla._torch.autocast import autocast
from tfla._torch.fast_path import any_autocast
from tfla._torch.transforms import transforms_active

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["delta_rule", "delta_rule_step"]

_DEFAULTS = DELTA.defaults


class _Options(TypedDict, total=False):
    """Those of `delta_rule`, for who checks types."""

    A_log: Tensor | None
    dt_bias: Tensor | None
    write: Write
    normalize_qk: bool
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    chunk_size: int | None
    qk_scale: float | None
    layout: Layout


@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    output_final_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: Write = _DEFAULTS.write,
    normalize_qk: bool = _DEFAULTS.normalize_qk,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = _DEFAULTS.chunk_size,
    qk_scale: float | None = _DEFAULTS.qk_scale,
    layout: Layout = _DEFAULTS.layout,
) -> Tensor | tuple[Tensor, Tensor]:
    """The delta rule over whole sequences, chunkwise: linear in T, parallel inside a chunk.

        C_t = exp(g_t) C_{t-1} + beta_t k_t r_t^T    r_t = v_t - exp(g_t) C_{t-1}^T k_t    h_t = C_t^T (scale q_t)

    Args:
        q, k: (B,T,Hqk,dqk) float32, float64, bfloat16 or float16. Any strides with a contiguous last axis. Keys are
            taken as they are: keys of length 1, by the caller or by `normalize_qk`, keep the state bounded.
        v: (B,T,H,dhv) in the dtype of q. H is a multiple of Hqk: head h reads query/key head h // (H // Hqk).
        beta: (B,T,H) how much of the residual r is written, any float dtype; `write` says how it is read.
        g: (B,T,H) logarithm of the decay, usually not above 0, any float dtype; -inf is a reset. None: no decay.
        A_log: (H) any float dtype: with it the log decay is -exp(A_log) * softplus(g + dt_bias).
        dt_bias: (H) any float dtype, where A_log is given; None is 0.
        write: "plain": beta as it is, usually in [0,1], or in [0,2] for states with negative eigenvalues; "sigmoid":
            sigmoid(beta); "twice_sigmoid": 2 * sigmoid(beta).
        normalize_qk: q and k become x / sqrt(|x|^2 + 1e-6) first, with gradients through it.
        initial_state: C (N,H,dqk,dhv); N = B, or the sequences of cu_seqlens. float32, or float64 when q is.
        output_final_state: also return the state after the last token, with gradients through it.
        cu_seqlens: (N+1) int32 or int64, any stride, 0 = c_0 <= ... <= c_N <= T: N sequences packed into one row
            (then B = 1). Tokens from c_N on are padding: their rows of h and of all gradients are 0.
        chunk_size: spacing of the states that backward stores; it trades memory for time and changes results by
            rounding only. None lets the plan choose.
        qk_scale: factor on q; None is dqk ** -0.5.
        layout: "bthd" as above, or "bhtd": q, k (B,Hqk,T,dqk), v, h (B,H,T,dhv), beta, g (B,H,T). Neither is copied.

    Returns:
        h, shaped as v, in the dtype of q; with output_final_state the pair (h, C).

    Raises:
        ValueError: an argument is not as described; the sentence names it. RuntimeError: this build or machine cannot
            run the call (it runs on the CPU), or a second derivative was asked for.
    """
    options = DELTA.encode((write, normalize_qk, layout, qk_scale, chunk_size))
    if is_compiling() or any_autocast():
        q, k, v = autocast(q, k, v)
    operator = operators.forward_with_state if output_final_state else operators.forward
    return operators.call(operator, (q, k, v, beta, g, A_log, dt_bias, initial_state, cu_seqlens, *options))


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    state: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: Write = _DEFAULTS.write,
    normalize_qk: bool = _DEFAULTS.normalize_qk,
    slots: Tensor | None = None,
    qk_scale: float | None = _DEFAULTS.qk_scale,
    layout: Layout = _DEFAULTS.layout,
) -> Tensor:
    """One token, or a few, on states that are updated in place.

    Args:
        q, k: (B,Hqk,dqk) for one token, or (B,T,Hqk,dqk) for T of them ((B,Hqk,T,dqk) with layout "bhtd").
        v: (B,H,dhv), or (B,T,H,dhv).
        beta, g: (B,H), or (B,T,H).
        state: C (S,H,dqk,dhv), which must be given; overwritten by the states after the last token.
        slots: (B) int32 or int64, any stride: row b works on state slots[b] of a pool of S, each slot at most once.
            A row with slot -1 is padding: it has no state, and its h is 0. None: row b on state b, with S = B.
        A_log, dt_bias, write, normalize_qk, qk_scale, layout: as in `delta_rule`.

    Returns:
        h, shaped as v, in the dtype of q. It has no gradient: call under torch.no_grad() or torch.inference_mode().
    """
    tensors = (q, k, v, beta, g, A_log, dt_bias, state)
    if is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        raise RuntimeError(
            "tfla: delta_rule_step was given a tensor that requires a gradient, and has none; "
            "call it under torch.no_grad(), or use delta_rule with initial_state"
        )
    if state is None:
        raise ValueError("tfla: state is missing; delta_rule_step needs the C that it is to update")
    options = DELTA.encode((write, normalize_qk, layout, qk_scale))
    compiling = is_compiling()
    if compiling or any_autocast():
        q, k, v = autocast(q, k, v)
    h = operators.step(q, k, v, beta, g, A_log, dt_bias, state, slots, *options)
    if not compiling and not transforms_active():
        increment_version(state)  # a graph that has saved the state must not go on from the new one
    return h
