"""The operators for PyTorch: mlstm (chunkwise), its two other formulations, and the step for decoding."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from tfla import _torch_library as library
from tfla._memory import torch_error
from tfla._options import (
    CHUNKWISE,
    DEFAULTS,
    GATES,
    HEAD_FIRST,
    NORMALIZERS,
    PARALLEL,
    RECURRENT,
    Gate,
    Layout,
    Normalizer,
    spacing,
    unknown,
)
from tfla.state import State

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["State", "mlstm", "mlstm_parallel", "mlstm_recurrent", "mlstm_step"]

InitialState = State | tuple[Tensor, Tensor, Tensor]


# One look-up for all three: this is on the way of every call.
_CODES: dict[Any, tuple[int, int, bool]] = {
    (gate, normalizer, layout): (GATES[gate], NORMALIZERS[normalizer], HEAD_FIRST[layout])
    for gate, normalizer, layout in itertools.product(GATES, NORMALIZERS, HEAD_FIRST)
}
# The step is called for every token. What an operator calls, and the operator without slots and options, of which each
# costs host time; what is named here needs no look-up in a module.
_step, _step_alone = library.step._op, library.step_alone._op
_STEP_DEFAULTS = ("exp", None, "bthd", 1e-6, None, None)
_MLSTM_DEFAULTS = (*_STEP_DEFAULTS, None, True, True)
_call_alone, _transforms_active = library.call_alone, library.transforms_active
_increment_version = torch.autograd.graph.increment_version
# Torch's own, and unknown to torch.compile: slower without it, not wrong.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def _codes(gate: object, normalizer: object, layout: object) -> tuple[int, int, bool]:
    try:
        return _CODES[gate, normalizer, layout]
    except (KeyError, TypeError):
        pass
    options: dict[str, tuple[object, tuple[object, ...]]] = {
        "gate": (gate, tuple(GATES)),
        "normalizer": (normalizer, tuple(NORMALIZERS)),
        "layout": (layout, tuple(HEAD_FIRST)),
    }
    raise next(unknown(name, value, accepted) for name, (value, accepted) in options.items() if value not in accepted)


def _encode(
    gate: object, normalizer: object, layout: object, eps: Any, qk_scale: Any, soft_cap: Any, *rest: Any
) -> tuple:
    codes = _codes(gate, normalizer, layout)
    given: tuple = (*codes, eps, qk_scale, soft_cap)
    if rest:
        exact_normalizer_grad, chunk_size, formulation = rest
        given = (*given, exact_normalizer_grad, spacing(chunk_size), formulation)
    defaults = DEFAULTS[: len(given)]
    if given == defaults:
        return ()
    return codes if given[len(codes) :] == defaults[len(codes) :] else given


_encoded: dict[tuple, tuple] = {}


def _options(*given: Any) -> tuple:
    """Options as the operators take them, without those at the end that are at their defaults: every argument of an
    operator costs host time, as does finding out what they are, so that is done once."""
    try:
        return _encoded[given]
    except (KeyError, TypeError):  # of which the second means an unhashable option, to be refused
        options = _encode(*given)
    if len(_encoded) < 1000 and all(x is None or type(x) in (str, float, int, bool) for x in given):
        _encoded[given] = options
    return options


def _parts(state: InitialState | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if state is None:
        return None, None, None
    try:
        C, n, m = state
    except (TypeError, ValueError):
        raise ValueError("tfla: initial_state is not a triple (C, n, m)") from None
    return C, n, m


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast q, k, v take its dtype, as operands of matrix products do; gates and states keep theirs."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _sequence(
    formulation: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    gate: Gate,
    normalizer: Normalizer | None,
    initial_state: InitialState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    qk_scale: float | None,
    eps: float,
    soft_cap: float | None,
    layout: Layout,
    exact_normalizer_grad: bool,
) -> Any:
    compiling = is_compiling()
    options = (_encode if compiling else _options)(
        gate, normalizer, layout, eps, qk_scale, soft_cap, exact_normalizer_grad, chunk_size, formulation
    )
    if compiling or _any_autocast():
        q, k, v = _autocast(q, k, v)
    if initial_state is None and cu_seqlens is None and not options:
        inputs: tuple = (q, k, v, i, f)
    else:
        inputs = (q, k, v, i, f, *_parts(initial_state), cu_seqlens, *options)
    call = library.call_traced if compiling else library.call
    if not output_final_state:
        return call(library.forward, inputs)
    h, *state = call(library.forward_with_state, inputs)
    return h, State(*state)


class _Options(TypedDict, total=False):
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


def _mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    gate: Gate = "exp",
    normalizer: Normalizer | None = None,
    initial_state: InitialState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    qk_scale: float | None = None,
    eps: float = 1e-6,
    soft_cap: float | None = None,
    layout: Layout = "bthd",
    exact_normalizer_grad: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Where options are given. Filling in and comparing so many defaults takes a tenth of a call's host time."""
    given = (gate, normalizer, layout, eps, qk_scale, soft_cap, chunk_size, initial_state is None, cu_seqlens is None)
    if given == _MLSTM_DEFAULTS and not (
        exact_normalizer_grad or output_final_state or is_compiling() or _any_autocast()
    ):
        return _call_alone(q, k, v, i, f)
    return _sequence(
        CHUNKWISE, q, k, v, i, f, gate, normalizer, initial_state, output_final_state, cu_seqlens,
        chunk_size, qk_scale, eps, soft_cap, layout, exact_normalizer_grad,
    )  # fmt: skip


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

    Returns:
        h, shaped as v, in the dtype of q; with output_final_state the pair (h, State(C, n, m)).

    Raises:
        ValueError: an argument is not as described; the sentence names it. RuntimeError: this build or machine cannot
            run the call, or a second derivative was asked for.
    """
    if options or is_compiling() or _any_autocast():
        return _mlstm(q, k, v, i, f, **options)
    return _call_alone(q, k, v, i, f)


functools.update_wrapper(mlstm, _mlstm, assigned=(), updated=())  # the signature that help() shows
_mlstm.__qualname__ = mlstm.__qualname__  # for errors about arguments


@overload
def mlstm_parallel(
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
def mlstm_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    output_final_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, State]: ...
def mlstm_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    gate: Gate = "exp",
    normalizer: Normalizer | None = None,
    initial_state: InitialState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_scale: float | None = None,
    eps: float = 1e-6,
    soft_cap: float | None = None,
    layout: Layout = "bthd",
    exact_normalizer_grad: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """The same function in the parallel formulation: quadratic in T, no states in between. Arguments as in `mlstm`."""
    return _sequence(
        PARALLEL, q, k, v, i, f, gate, normalizer, initial_state, output_final_state, cu_seqlens, None, qk_scale, eps,
        soft_cap, layout, exact_normalizer_grad,
    )  # fmt: skip


@overload
def mlstm_recurrent(
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
def mlstm_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    output_final_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, State]: ...
def mlstm_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    gate: Gate = "exp",
    normalizer: Normalizer | None = None,
    initial_state: InitialState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_scale: float | None = None,
    eps: float = 1e-6,
    soft_cap: float | None = None,
    layout: Layout = "bthd",
    exact_normalizer_grad: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """The same function token by token. Arguments as in `mlstm`; its gradient is computed chunkwise."""
    return _sequence(
        RECURRENT, q, k, v, i, f, gate, normalizer, initial_state, output_final_state, cu_seqlens, None, qk_scale, eps,
        soft_cap, layout, exact_normalizer_grad,
    )  # fmt: skip


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: InitialState,
    *,
    gate: Gate = "exp",
    normalizer: Normalizer | None = None,
    slots: Tensor | None = None,
    qk_scale: float | None = None,
    eps: float = 1e-6,
    soft_cap: float | None = None,
    layout: Layout = "bthd",
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
    if is_dynamo_compiling():
        return library.step(*_autocast(q, k, v), i, f, C, n, m, slots, *_encode(*given))
    if _any_autocast():
        q, k, v = _autocast(q, k, v)
    if _transforms_active():
        return library.step(q, k, v, i, f, C, n, m, slots, *_options(*given))
    try:
        if slots is None and given == _STEP_DEFAULTS:
            h = _step_alone(q, k, v, i, f, C, n, m)
        else:
            h = _step(q, k, v, i, f, C, n, m, slots, *_options(*given))
    except RuntimeError as error:
        raise torch_error(error) from None
    _increment_version((C, n, m))  # a graph that has saved the state must not go on from the new one
    return h
