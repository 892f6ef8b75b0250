"""Mamba-2 in Hugging Face models: Mamba-2 itself, Bamba, Falcon-H1, Granite-MoE-hybrid, Zamba2 and Nemotron-H.

Their mixers (a projection, a causal convolution, the scan, a gated norm) call the same two functions, of which each
module has a copy: one for sequences and one for single tokens. `patch` of tfla.compat.transformers replaces these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tfla
from tfla.compat._replaced import Functions
from tfla.compat.mamba import selective_state_update

FAMILIES = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "zamba2", "nemotron_h")


def _scan(original: Callable[..., Any]) -> Callable[..., Any]:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        *,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **others: Any,
    ) -> Any:
        """others: what layers hand to every kernel."""
        options: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
        packed = others.get("seq_idx") is not None or others.get("cu_seqlens") is not None
        if hidden_states.device.type != "cpu" or packed:  # packed sequences it refuses, as the convolution does before
            return original(
                hidden_states, dt, A, B, C, chunk_size, initial_states=initial_states, dt_limit=dt_limit,
                return_final_states=return_final_states, **options, **others,
            )  # fmt: skip
        if initial_states is not None and torch.is_grad_enabled():
            # The model copies the last state over the one given here, which backward still needs.
            initial_states = initial_states.clone()
        options |= {"initial_state": initial_states, "dt_limit": tuple(dt_limit)}
        x, B, C = _apart(hidden_states), _apart(B), _apart(C)
        if return_final_states:
            return tfla.ssd(x, dt, A, B, C, output_final_state=True, **options)
        return tfla.ssd(x, dt, A, B, C, **options)

    return mamba2_chunk_scan


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def mamba2_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        *,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The state changes in place. others: what layers hand to every kernel."""
        options: dict[str, Any] = {"z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
        if hidden_states.device.type != "cpu":
            return original(state, hidden_states, dt, A, B, C, D, **options, **others)
        tensors = (state, hidden_states, dt, A, B, C, D, z, dt_bias)
        if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors):
            return selective_state_update(state, hidden_states, dt, A, B, C, D, **options)
        # A sequence of one token: with gradients, which steps have not. A, dt and dt_bias are views of one per head.
        options |= {"z": None if z is None else z.unsqueeze(1), "dt_bias": None if dt_bias is None else dt_bias[..., 0]}
        x, B, C = (_apart(given.unsqueeze(1)) for given in (hidden_states, B, C))
        out, last = tfla.ssd(
            x, dt[:, None, :, 0], A[:, 0, 0], B, C, D=D, initial_state=state.clone(), output_final_state=True, **options
        )
        state.copy_(last)
        return out.squeeze(1)

    return mamba2_selective_state_update


def _apart(x: Tensor) -> Tensor:
    """A convolution over (B,D,T) leaves its outputs transposed."""
    return x if x.stride(-1) == 1 else x.contiguous()


LAYERS = Functions(FAMILIES, {"mamba2_chunk_scan": _scan, "mamba2_selective_state_update": _step})
