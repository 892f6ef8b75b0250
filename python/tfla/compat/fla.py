"""Functions of flash-linear-attention whose decay is one number per token and head, with its signatures.

Each is a way to make gates for the same kernels: the decay is a forget gate in log space, every input weighs 1, and
there is no denominator. q, k (B,T,H,K), v (B,T,H,V); states (N,H,K,V), returned in float32. H of v may be a multiple of
that of q and k. Any length and head dimension. Gradients go to q, k, v, g, g_gamma and the initial state, from the
output and the final state. The delta rule, an operator of its own, is in `fla_delta` and can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tfla
from tfla._options import DEFAULTS
from tfla.compat.fla_delta import (
    _refuse,
    _state_v_first,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
)

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
]

Result = tuple[Tensor, Tensor | None]


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, as (o, final state or None).

    g (B,T,H) or g_gamma (H) is the log decay; neither: no decay. state_v_first: states are (N,H,V,K).
    cu_seqlens_cpu says nothing that cu_seqlens does not, and no copy on the CPU is needed.
    """
    options = _chunk_options(kwargs)
    return _simple_gla(
        tfla.mlstm, q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, **options
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """The same token by token; with reverse from the last token of each sequence to its first."""
    state_v_first = _state_v_first(kwargs, state_v_first)
    _refuse(kwargs)
    if not reverse:
        return _simple_gla(
            tfla.mlstm_recurrent, q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first,
            cu_seqlens,
        )  # fmt: skip
    # Sequences change their order too when the packed axis is turned around.
    q, k, v = q.flip(1), k.flip(1), v.flip(1)
    g = None if g is None else g.flip(1)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens[-1] - cu_seqlens.flip(0)
        initial_state = None if initial_state is None else initial_state.flip(0)
    o, state = _simple_gla(
        tfla.mlstm_recurrent, q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )
    if state is not None and cu_seqlens is not None:
        state = state.flip(0)
    return o.flip(1), state


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """Retention: head h decays by 1 - 2^(-5-h) per token."""
    return _simple_gla(
        tfla.mlstm, q, k, v, None, _retention(q), scale, initial_state, output_final_state, False, cu_seqlens,
        **_chunk_options(kwargs),
    )  # fmt: skip


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """The same token by token; with reverse from the last token of each sequence to its first."""
    return fused_recurrent_simple_gla(
        q, k, v, None, _retention(q), scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens,
        **kwargs,
    )  # fmt: skip


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """Lightning attention: head h of H decays by exp(-8 h / H (1 - layer_idx / num_layers)) per token."""
    g_gamma = _lightning(q, layer_idx, num_layers)
    return _simple_gla(
        tfla.mlstm, q, k, v, None, g_gamma, scale, initial_state, output_final_state, False, cu_seqlens,
        **_chunk_options(kwargs),
    )  # fmt: skip


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """The same token by token; with reverse from the last token of each sequence to its first."""
    _refuse(kwargs)
    g_gamma = _lightning(q, layer_idx, num_layers)
    return fused_recurrent_simple_gla(
        q, k, v, None, g_gamma, scale, initial_state, output_final_state, reverse, False, cu_seqlens
    )


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Linear attention, without decay. normalize divides by scale q.z + 1e-10, z the sum of the keys so far; the state
    is then (S, z) with z (N,1,H,K), S None unless output_final_state, and an initial one may be S alone."""
    S, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    if z is not None and not normalize:
        raise ValueError("tfla: initial_state is a pair (S, z) with normalize=False, which has no z")
    o, state = chunk_simple_gla(
        q, k, v, scale=scale, initial_state=S, output_final_state=output_final_state, cu_seqlens=cu_seqlens
    )
    if not normalize:
        return o, state
    # The denominator is the output for values of one: q.z comes out of the same kernel, from the state z.
    dtype = _gate_dtype(q)
    wide_q, wide_k = q.to(dtype), k.to(dtype)
    ones = wide_q.new_ones(()).expand(*v.shape[:3], 1)
    first = None if z is None else z.squeeze(1).unsqueeze(-1)
    denominator, last = chunk_simple_gla(
        wide_q, wide_k, ones, scale=scale, initial_state=first, output_final_state=True, cu_seqlens=cu_seqlens
    )
    assert last is not None  # asked for
    return (o / (denominator + 1e-10)).to(o.dtype), (state, last.squeeze(-1).unsqueeze(1).to(k.dtype))


def _chunk_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """chunk_size, which these functions take without naming it, and tfla's keep; everything else is refused."""
    if "head_first" in kwargs:
        raise DeprecationWarning("tfla: head_first is gone from flash-linear-attention; tensors are (B,T,H,D)")
    unknown = set(kwargs) - {"chunk_size", "keep"}
    if unknown:
        raise TypeError(f"tfla: {sorted(unknown)[0]} is not an argument of this function")
    return {"chunk_size": kwargs.get("chunk_size"), "keep": kwargs.get("keep", DEFAULTS.keep)}


def _retention(q: Tensor) -> Tensor:
    """Log decays of all heads."""
    return torch.log1p(-torch.exp2(-5 - torch.arange(q.shape[2], dtype=_gate_dtype(q), device=q.device)))


def _lightning(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """Log decays of all heads."""
    slope = -(8 / q.shape[2] * (1 - layer_idx / num_layers))
    return slope * torch.arange(q.shape[2], dtype=_gate_dtype(q), device=q.device)


def _gate_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _simple_gla(
    operator: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> Result:
    dtype = _gate_dtype(q)
    # Gates that do not change over some axis are views with stride 0: no memory, and no work to make them.
    weight_one = torch.zeros((), dtype=dtype, device=q.device).expand(v.shape[:3])
    if g is not None and g_gamma is not None:
        raise ValueError("tfla: g and g_gamma are both given; the decay comes from one of them")
    if g_gamma is not None:
        if g_gamma.shape != v.shape[2:3]:
            raise ValueError(f"tfla: g_gamma has shape {tuple(g_gamma.shape)}; it must be (H) = ({v.shape[2]},)")
        g = g_gamma.to(dtype).expand(v.shape[:3])
    elif g is None:
        g = weight_one
    state = None
    if initial_state is not None:
        C = (initial_state.transpose(-1, -2) if state_v_first else initial_state).to(dtype).contiguous()
        state = (C, C.new_zeros(C.shape[:-1]), C.new_zeros(C.shape[:-2]))
    result = operator(
        q, k, v, weight_one, g, gate="log", qk_scale=scale, initial_state=state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, **options,
    )  # fmt: skip
    if not output_final_state:
        return result, None
    o, last = result
    return o, last.C.transpose(-1, -2) if state_v_first else last.C
