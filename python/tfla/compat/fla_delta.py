"""Functions of flash-linear-attention for the delta rule, gated or not, with its signatures.

q, k (B,T,H,K), v (B,T,HV,V), beta and g (B,T,HV); HV may be a multiple of H. States (N,HV,K,V), returned in float32, or
in float64 where q is. Any length and head dimension. Gradients go to q, k, v, beta, g, A_log, dt_bias and the initial
state, from the output and the final state. chunk_... and fused_recurrent_... are one operator: they differ in what they
take.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import tfla

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
]

Result = tuple[Tensor, Tensor | None]
_GATE = frozenset({"use_gate_in_kernel", "A_log", "dt_bias"})


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Result:
    """S_t = exp(g_t) S_{t-1} + beta_t k_t r_t^T, r_t = v_t - exp(g_t) S_{t-1}^T k_t, o_t = scale S_t^T q_t: (o, final
    state or None).

    Args:
        g: (B,T,HV) log decay; with use_gate_in_kernel=True a pre-activation, and the log decay is
            -exp(A_log) softplus(g + dt_bias), A_log, dt_bias (HV), which are not read otherwise, as there.
        beta: (B,T,HV); with use_beta_sigmoid_in_kernel a pre-activation of sigmoid, doubled by allow_neg_eigval.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(|x|^2 + 1e-6).
        state_v_first: states are (N,HV,V,K).
        cu_seqlens_cpu: says nothing that cu_seqlens does not, and no copy on the CPU is needed.
        chunk_size: spacing of stored states; any number.
    """
    if cp_context is not None:
        raise ValueError("tfla: cp_context is given; the delta rule runs on one device")
    state_v_first = _state_v_first(kwargs, state_v_first)
    gate = {name: kwargs.pop(name) for name in _GATE & kwargs.keys()}
    return _delta_rule(
        q, k, v, beta, g, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        write=_write(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
        **_gate(g, **gate), **_chunk_options(kwargs),
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """The same; without g nothing decays, without beta it is 1. Decays per channel (gk, gv) are refused."""
    for name, value in (("gk", gk), ("gv", gv)):
        if value is not None:
            raise ValueError(f"tfla: {name} is given; the delta rule has one decay per token and head, g")
    state_v_first = _state_v_first(kwargs, state_v_first)
    _refuse(kwargs)
    return _delta_rule(
        q, k, v, beta, g, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        write=_write(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
        **_gate(g, use_gate_in_kernel, A_log, dt_bias),
    )  # fmt: skip


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """The delta rule without decay: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T. float32 too, unlike there."""
    return _delta_rule(
        q, k, v, beta, None, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        **_chunk_options(kwargs),
    )  # fmt: skip


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """The same; without beta it is 1."""
    return _delta_rule(
        q, k, v, beta, None, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def _state_v_first(kwargs: dict[str, Any], state_v_first: bool) -> bool:
    """With its former name, which they still take."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("tfla: state_v_first and transpose_state_layout are both given; the second is its former name")
    warnings.warn("transpose_state_layout is now named state_v_first", DeprecationWarning, stacklevel=3)
    return bool(kwargs.pop("transpose_state_layout"))


def _refuse(kwargs: dict[str, Any]) -> None:
    if "head_first" in kwargs:
        raise DeprecationWarning("tfla: head_first is gone from flash-linear-attention; tensors are (B,T,H,D)")
    if kwargs:
        raise TypeError(f"tfla: {min(kwargs)} is not an argument of this function")


def _chunk_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """chunk_size, which these functions take without naming it; everything else is refused."""
    chunk_size = kwargs.pop("chunk_size", None)
    _refuse(kwargs)
    return {"chunk_size": chunk_size}


def _write(sigmoid: bool, allow_neg_eigval: bool) -> str:
    if allow_neg_eigval and not sigmoid:
        raise ValueError("tfla: allow_neg_eigval is True without use_beta_sigmoid_in_kernel; double beta yourself")
    return "twice_sigmoid" if allow_neg_eigval else "sigmoid" if sigmoid else "plain"


def _gate(
    g: Tensor | None, use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None
) -> dict[str, Tensor | None]:
    if not use_gate_in_kernel:
        return {}
    for name, value in (("A_log", A_log), ("g", g)):
        if value is None:
            raise ValueError(f"tfla: {name} is missing; use_gate_in_kernel makes the decay of g, A_log and dt_bias")
    return {"A_log": A_log, "dt_bias": dt_bias}


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    normalize_qk: bool,
    cu_seqlens: Tensor | None,
    *,
    state_v_first: bool = False,
    **options: Any,
) -> Result:
    if beta is None:
        beta = torch.ones((), dtype=_wide(q), device=q.device).expand(v.shape[:3])
    if initial_state is not None:
        initial_state = (initial_state.transpose(-1, -2) if state_v_first else initial_state).to(_wide(q)).contiguous()
    o, last = run(
        q, k, v, beta, g, initial_state, output_final_state, cu_seqlens=cu_seqlens, normalize_qk=normalize_qk,
        qk_scale=scale, **options,
    )  # fmt: skip
    return o, last.transpose(-1, -2) if state_v_first and last is not None else last


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    *,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    **options: Any,
) -> Result:
    """(h, C or None), for any strides. A token without gradients, as in decoding, takes the kernel for steps."""
    # A convolution over (B,D,T) leaves its outputs transposed.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    inputs = (q, k, v, beta, g, initial_state, *options.values())
    trained = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    if trained or cu_seqlens is not None or q.shape[1] != 1:
        options |= {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size, "initial_state": initial_state}
        if output_final_state:
            return tfla.delta_rule(q, k, v, beta, g, output_final_state=True, **options)
        return tfla.delta_rule(q, k, v, beta, g, **options), None
    if initial_state is None:
        state = torch.zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=_wide(q), device=q.device)
    else:
        state = initial_state.clone()  # the one given stays as it is
    h = tfla.delta_rule_step(q, k, v, beta, g, state, **options)
    return h, state if output_final_state else None
