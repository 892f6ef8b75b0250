"""The functions of the package causal_conv1d, with its shapes and names: x (B,D,T), weight (D,W), states (B,D,W-1).

On the CPU they are `tfla.causal_conv1d` and its step; on other devices, which have no kernels, PyTorch code.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import tfla

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

Activation = Literal["silu", "swish"]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y (B,D,T), and with return_final_states the last W-1 inputs (B,D,W-1), written into final_states_out if given.

    Any strides and widths to 32 will do. Tokens with a seq_idx (B,T) below 0 are padding, whose y is 0.
    """
    _check_activation(activation)
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ValueError("tfla: seq_idx is given with initial_states or return_final_states; it goes with neither")
    if _has_kernels(x):
        options: dict[str, Any] = {"activation": activation, "initial_state": initial_states, "seq_idx": seq_idx}
        options |= {"output_final_state": return_final_states, "layout": "bdt"}
        found = tfla.causal_conv1d(x, weight, bias, **options)
    else:
        found = _sequences_by_torch(x, weight, bias, seq_idx, initial_states, return_final_states, activation)
    if final_states_out is None or not return_final_states:
        return found
    return found[0], final_states_out.copy_(found[1])


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """y of new tokens, (B,D) or (B,D,T); conv_state (B,D,L), or its rows conv_state_indices, changes in place.

    With cache_seqlens (B) the state is a ring, into which the next input goes at cache_seqlens % L. A row with index -1
    is padding: its y is 0, and no state changes. There are no gradients.
    """
    _check_activation(activation)
    if _has_kernels(x):
        return tfla.causal_conv1d_step(
            x, conv_state, weight, bias, activation=activation, slots=conv_state_indices, cache_seqlens=cache_seqlens,
            layout="bdt",
        )  # fmt: skip
    return _step_by_torch(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)


def _has_kernels(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _check_activation(activation: str | None) -> None:
    if activation not in (None, "silu", "swish"):  # NotImplementedError is what the package raises
        raise NotImplementedError(f"tfla: activation is {activation!r}; it must be None, 'silu' or 'swish'")


# ---------------------------------------------------------------- where there are no kernels
def _activated(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    y = y if bias is None else y + bias[:, None]
    return y if activation is None else F.silu(y)


def _sequences_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial: Tensor | None, final: bool,
    activation: str | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Shifted products: with seq_idx each is masked."""
    width, tokens = weight.shape[1], x.shape[2]
    padded = F.pad(x, (width - 1, 0)) if initial is None else torch.cat([initial.to(x.dtype), x], dim=2)
    y = x * weight[:, -1:]
    for shift in range(1, width):
        earlier = padded[:, :, width - 1 - shift : width - 1 - shift + tokens]
        if seq_idx is not None:
            same = F.pad(seq_idx, (shift, 0), value=-1)[:, :tokens] == seq_idx
            earlier = torch.where(same[:, None], earlier, 0)
        y = y + earlier * weight[:, -1 - shift, None]
    y = _activated(y, bias, activation)
    if seq_idx is not None:
        y = torch.where((seq_idx >= 0)[:, None], y, 0)
    y = y.to(x.dtype)
    return (y, padded[:, :, tokens:]) if final else y


def _step_by_torch(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    cache_seqlens: Tensor | None, indices: Tensor | None,
) -> Tensor:  # fmt: skip
    tokens = x.unsqueeze(2) if x.dim() == 2 else x
    (batch, channels, count), length, reach = tokens.shape, conv_state.shape[2], weight.shape[1] - 1
    rows = torch.arange(batch, device=x.device) if indices is None else indices.long()
    done = rows.new_zeros(batch) if cache_seqlens is None else cache_seqlens.long()
    state = conv_state[rows]
    # From here on the state's oldest input is in front, whatever it was.
    order = (torch.arange(length, device=x.device) + done[:, None]) % max(length, 1)
    state = state.gather(2, order[:, None].expand(batch, channels, length))
    joined = torch.cat([state, tokens.to(state.dtype)], dim=2)
    y = torch.zeros_like(tokens)
    for w in range(reach + 1):
        y = y + joined[:, :, length - reach + w : length - reach + w + count].to(x.dtype) * weight[:, w, None]
    y = _activated(y, bias, activation).to(x.dtype)
    new = joined[:, :, count:]
    begin = done if cache_seqlens is None else done + count
    back = (torch.arange(length, device=x.device) - begin[:, None]) % max(length, 1)
    new = new.gather(2, back[:, None].expand(batch, channels, length))
    valid = rows >= 0
    conv_state[rows[valid]] = new[valid]
    y = torch.where(valid[:, None, None], y, 0)
    return y.squeeze(2) if x.dim() == 2 else y
