"""The causal convolution of a few tokens, channel by channel, for PyTorch: whole sequences, and the decoding step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor, is_grad_enabled
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from tfla._options import unknown
from tfla._torch import conv as operators
from tfla._torch.transforms import transforms_active

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["causal_conv1d", "causal_conv1d_step"]

Activation = Literal["silu", "swish"]
ConvLayout = Literal["btd", "bdt"]
_ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}  # ConvActivation of include/tfla/conv.h


class _Options(TypedDict, total=False):
    """Those of `causal_conv1d`, for who checks types."""

    activation: Activation | None
    initial_state: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None
    layout: ConvLayout


def _code(activation: str | None) -> int:
    try:
        return _ACTIVATIONS[activation]
    except (KeyError, TypeError):  # of which the second means a value that has no hash
        raise unknown("activation", activation, tuple(_ACTIVATIONS)) from None


def _channels_are_first(layout: str) -> bool:
    if layout not in ("btd", "bdt"):
        raise unknown("layout", layout, ("btd", "bdt"))
    return layout == "bdt"


def _turned(x: Tensor | None) -> Tensor | None:
    """(.,D,T) as (.,T,D); what is no such tensor is left to the operator, which refuses it."""
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 3 else x


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    output_final_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    layout: ConvLayout = "btd",
) -> Tensor | tuple[Tensor, Tensor]:
    """y_t = act(bias + sum_w weight_w * x_{t-W+1+w}), channel by channel, with gradients.

    Args:
        x: (B,T,D) float32, float64, bfloat16 or float16, any strides. Fast, and not copied, where channels lie side by
            side in memory, or tokens do.
        weight: (D,W) any float dtype, W at most 32; the last one is for the token itself.
        bias: (D) any float dtype; None is 0.
        activation: None, or "silu", of which "swish" is another name.
        initial_state: (N,W-1,D) any float dtype, the inputs before each sequence, the oldest first; N = B, or the
            sequences of cu_seqlens. None is 0.
        output_final_state: also return the last W-1 inputs of each sequence, with gradients through them.
        seq_idx: (B,T) int32 or int64: neighbours of one number are a sequence, which does not see the others. Where it
            is below 0 is padding: y and gradients are 0. Without states and cu_seqlens.
        cu_seqlens: (N+1) int32 or int64, 0 = c_0 <= ... <= c_N <= T: N sequences packed into one row (then B = 1).
            Tokens from c_N on are padding: their rows of y and of all gradients are 0.
        layout: "btd" as above, or "bdt": x, y (B,D,T) and states (N,D,W-1). Neither is copied.

    Returns:
        y, shaped as x, in its dtype; with output_final_state the pair (y, state), the state in the dtype of x.

    Raises:
        ValueError: an argument is not as described; the sentence names it. RuntimeError: this build or machine cannot
            run the call (it runs on the CPU), or a second derivative was asked for.
    """
    code, turned = _code(activation), _channels_are_first(layout)
    if turned:
        x, initial_state = _turned(x), _turned(initial_state)  # type: ignore[assignment]
    operator = operators.forward_with_state if output_final_state else operators.forward
    found = operators.call(operator, (x, weight, bias, initial_state, cu_seqlens, seq_idx, code))
    if not turned:
        return found
    return tuple(y.transpose(1, 2) for y in found) if output_final_state else found.transpose(1, 2)


def causal_conv1d_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    slots: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    layout: ConvLayout = "btd",
) -> Tensor:
    """One token, or a few, on states that are updated in place.

    Args:
        x: (B,D) for one token, or (B,T,D) for T of them ((B,D,T) with layout "bdt").
        state: (S,L,D), L at least W-1, any float dtype and strides ((S,D,L) with layout "bdt"): the last L inputs of
            each sequence, the oldest first; overwritten by those after the last token.
        slots: (B) int32 or int64: row b works on state slots[b] of a pool of S, each slot at most once. A row with slot
            -1 is padding: it has no state, and its y is 0. None: row b on state b, with S = B.
        cache_seqlens: (B) int32 or int64: the state is a ring, in which the input number i of a sequence lies in row
            i % L, and cache_seqlens[b] inputs came before.
        weight, bias, activation: as in `causal_conv1d`.

    Returns:
        y, shaped as x, in its dtype. It has no gradient: call under torch.no_grad() or torch.inference_mode().
    """
    if is_grad_enabled() and any(getattr(given, "requires_grad", False) for given in (x, state, weight, bias)):
        raise RuntimeError(
            "tfla: causal_conv1d_step was given a tensor that requires a gradient, and has none; "
            "call it under torch.no_grad(), or use causal_conv1d with initial_state"
        )
    code, turned = _code(activation), _channels_are_first(layout)
    many = turned and isinstance(x, Tensor) and x.dim() == 3
    view = _turned(state) if turned else state
    y = operators.step(_turned(x) if many else x, weight, bias, view, slots, cache_seqlens, code)
    if not is_compiling() and not transforms_active():
        increment_version(state)  # a graph that has saved the state must not go on from the new one
    return y.transpose(1, 2) if many else y
