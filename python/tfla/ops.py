"""The operators for PyTorch: mlstm (chunkwise), its two other formulations, and the step for decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, overload

from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from tfla._options import DEFAULTS, Gate, Keep, Layout, Normalizer, encode
from tfla._torch import derivatives, fast_path, operators
from tfla._torch.autocast import autocast
from tfla._torch.fast_path import any_autocast, call_alone, encoded
from tfla._torch.transforms import transforms_active
from tfla.state import State

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["State", "mlstm", "mlstm_parallel", "mlstm_recurrent", "mlstm_step"]

InitialState = State | tuple[Tensor, Tensor, Tensor]


def _parts(state: InitialState | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if state is None:
        return None, None, None
    try:
        C, n, m = state
    except (TypeError, ValueError):
        raise ValueError("tfla: initial_state is not a triple (C, n, m)") from None
    return C, n, m


def _mlstm(
    formulation: str,
    /,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    gate: Gate = DEFAULTS.gate,
    normalizer: Normalizer | None = DEFAULTS.normalizer,
    initial_state: InitialState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = DEFAULTS.chunk_size,
    qk_scale: float | None = DEFAULTS.qk_scale,
    eps: float = DEFAULTS.eps,
    soft_cap: float | None = DEFAULTS.soft_cap,
    layout: Layout = DEFAULTS.layout,
    exact_normalizer_grad: bool = DEFAULTS.exact_normalizer_grad,
    keep: Keep = DEFAULTS.keep,
) -> Tensor | tuple[Tensor, State]:
    """Whole sequences in any formulation."""
    given = (
        gate, normalizer, layout, eps, qk_scale, soft_cap, exact_normalizer_grad, chunk_size, keep, formulation,
    )  # fmt: skip
    compiling = is_compiling()
    options = encode(given) if compiling else encoded(given)
    if compiling or any_autocast():
        q, k, v = autocast(q, k, v)
    inputs: tuple = (q, k, v, i, f)
    if options or initial_state is not None or cu_seqlens is not None:
        inputs = (*inputs, *_parts(initial_state), cu_seqlens, *options)
    call = derivatives.call if compiling else fast_path.call
    if not output_final_state:
        return call(operators.forward, inputs)
    h, *state = call(operators.forward_with_state, inputs)
    return h, State(*state)


class _Options(TypedDict, total=False):
    """Those of `_mlstm`, for who checks types."""

    gate: Gate
    normalizer: Normalizer | None
    initial_state: InitialState | None
    cu_seqlens: Tensor | None
    qk_scale: float | None
    eps: float
    soft_cap: float | None
    layout: Layout
    exact_normalizer_grad: bool


class _ChunkwiseOptions(_Options, total=False):
    chunk_size: int | None
    keep: Keep


class _Formulation(Protocol):
    """mlstm_parallel and mlstm_recurrent, for who checks types."""

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        *,
        output_final_state: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        *,
        output_final_state: Literal[True],
        **options: Unpack[_Options],
    ) -> tuple[Tensor, State]: ...


_mlstm.__qualname__ = "mlstm"  # for errors about arguments
_SIGNATURE = inspect.signature(_mlstm)
_PARAMETERS = {name: x for name, x in _SIGNATURE.parameters.items() if name != "formulation"}
_WITHOUT_CHUNKS = {name: x for name, x in _PARAMETERS.items() if name not in ("chunk_size", "keep")}


def _signed(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Any:
    """Gives the function the signature that help() shows."""
    signature = _SIGNATURE.replace(parameters=list(parameters.values()))
    setattr(function, "__signature__", signature)  # noqa: B010
    return function


def _formulation(function: Callable[..., Any]) -> _Formulation:
    return _signed(function, _WITHOUT_CHUNKS)


def _refuse_unknown(name: str, options: Mapping[str, Any]) -> None:
    """What Python says of a keyword that is not in a signature: the other formulations have no chunks."""
    for word in options:
        if word not in _WITHOUT_CHUNKS:
            raise TypeError(f"{name}() got an unexpected keyword argument {word!r}")


@overload
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[_ChunkwiseOptions],
) -> Tensor: ...
@overload
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    output_final_state: Literal[True],
    **options: Unpack[_ChunkwiseOptions],
) -> tuple[Tensor, State]: ...
def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, **options: Any) -> Tensor | tuple[Tensor, State]:
    """The mLSTM over whole sequences, chunkwise: linear in T, parallel inside a chunk.

        C_t = f_t C_{t-1} + i_t k_t v_t^T    n_t = f_t n_{t-1} + i_t k_t    h_t = C_t^T (scale q_t) / den_t

    Args:
        q, k: (B,T,Hqk,dqk) float32, float64, bfloat16 or float16. Any strides with a contiguous last axis.
        v: (B,T,H,dhv) in the dtype of q. H is a multiple of Hqk: head h reads query/key head h // (H // Hqk).
        i, f: (B,T,H) pre-activations of input and forget gate, any float dtype (float32 is a good one).
        gate: "exp", i.e. input gate exp(i); or "sigmoid", sigmoid(i). The forget gate is sigmoid(f) in both. With "log"
            i and f are the logarithms of the gates, for decays that are made elsewhere: f = 0 keeps, -inf resets.
        normalizer: "max": den = max(|q.n|, exp(-m)) + eps; "none": den = 1. None takes the paper's choice for the
            gate: "max" for "exp", else "none".
        initial_state: (C, n, m) with C (N,H,dqk,dhv), n (N,H,dqk), m (N,H); N = B, or the sequences of cu_seqlens.
            float32, or float64 when q is. Gradients flow into C and n; m only fixes their scale and has none.
        output_final_state: also return the state after the last token, with gradients through its C and n.
        cu_seqlens: (N+1) int32 or int64, any stride, 0 = c_0 <= ... <= c_N <= T: N sequences packed into one row
            (then B = 1). Tokens from c_N on are padding: their rows of h and of all gradients are 0.
        chunk_size: spacing of the states that backward stores; it trades memory for time and changes results by
            rounding only. None lets the plan choose.
        qk_scale: factor on q; None is dqk ** -0.5.
        eps: added to the denominator after the max.
        soft_cap: gates become cap * tanh(x / cap) first; None is no cap.
        layout: "bthd" as above, or "bhtd": q, k (B,Hqk,T,dqk), v, h (B,H,T,dhv), i, f (B,H,T). Neither is copied.
        exact_normalizer_grad: differentiate through the denominator too. The paper holds it constant, since the term
            cancels under the norm layer that follows.
        keep: what forward leaves for backward on a GPU, where a gradient is wanted. "denominators": two numbers per
            token and head. "states": these and the states between chunks, dqk * dhv numbers each, which backward then
            does not make again. Where a kernel cannot keep states (docs/python/keep.md) it keeps denominators. A CPU
            keeps nothing. Results differ by rounding at most.

    Returns:
        h, shaped as v, in the dtype of q; with output_final_state the pair (h, State(C, n, m)).

    Raises:
        ValueError: an argument is not as described; the sentence names it. RuntimeError: this build or machine cannot
            run the call, or a second derivative was asked for.
    """
    if options or is_compiling() or any_autocast():
        return _mlstm("chunkwise", q, k, v, i, f, **options)
    return call_alone(q, k, v, i, f)


_signed(mlstm, _PARAMETERS)


@_formulation
def mlstm_parallel(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, **options: Any) -> Any:
    """The same function in the parallel formulation: quadratic in T, no states in between. Arguments as in `mlstm`."""
    _refuse_unknown("mlstm_parallel", options)
    return _mlstm("parallel", q, k, v, i, f, **options)


@_formulation
def mlstm_recurrent(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, **options: Any) -> Any:
    """The same function token by token. Arguments as in `mlstm`; its gradient is computed chunkwise."""
    _refuse_unknown("mlstm_recurrent", options)
    return _mlstm("recurrent", q, k, v, i, f, **options)


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: InitialState,
    *,
    gate: Gate = DEFAULTS.gate,
    normalizer: Normalizer | None = DEFAULTS.normalizer,
    slots: Tensor | None = None,
    qk_scale: float | None = DEFAULTS.qk_scale,
    eps: float = DEFAULTS.eps,
    soft_cap: float | None = DEFAULTS.soft_cap,
    layout: Layout = DEFAULTS.layout,
) -> Tensor:
    """One token, or a few, on states that are updated in place.

    Args:
        q, k: (B,Hqk,dqk) for one token, or (B,T,Hqk,dqk) for T of them ((B,Hqk,T,dqk) with layout "bhtd").
        v: (B,H,dhv), or (B,T,H,dhv).
        i, f: (B,H), or (B,T,H).
        state: (C, n, m) with C (S,H,dqk,dhv), n (S,H,dqk), m (S,H); overwritten by the states after the last token.
        slots: (B) int32 or int64, any stride: row b works on state slots[b] of a pool of S, each slot at most once.
            A row with slot -1 is padding: it has no state, and its h is 0. None: row b on state b, with S = B. On a
            GPU slots are not checked: one out of range is taken for padding, and one given twice is undefined.
        gate, normalizer, qk_scale, eps, soft_cap, layout: as in `mlstm`.

    Returns:
        h, shaped as v, in the dtype of q. It has no gradient: call under torch.no_grad() or torch.inference_mode().
    """
    C, n, m = state
    if is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v, i, f, C, n, m)):
        raise RuntimeError(
            "tfla: mlstm_step was given a tensor that requires a gradient, and has none; "
            "call it under torch.no_grad(), or use mlstm with initial_state"
        )
    given = (gate, normalizer, layout, eps, qk_scale, soft_cap)
    compiling = is_dynamo_compiling()
    if compiling or any_autocast():
        q, k, v = autocast(q, k, v)
    if compiling or transforms_active():
        return operators.step(q, k, v, i, f, C, n, m, slots, *encode(given))
    return fast_path.step(q, k, v, i, f, C, n, m, slots, given)
