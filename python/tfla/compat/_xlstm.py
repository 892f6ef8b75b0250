"""Calls of the operator as mlstm_kernels, xlstm and transformers make them: q, k (B,NH,S,DHQK), v (B,NH,S,DHHV), gates
(B,NH,S), a state (C, N, M) with M (B,NH,1), any dtype of states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

InputGate = Literal["exp", "sigmoid"]
States = tuple[Tensor, Tensor, Tensor]


def initial_state(q: Tensor, v: Tensor, c: Tensor | None, n: Tensor | None, m: Tensor | None) -> States | None:
    """(C, n, m) as the operator takes them: m (B,NH), in float32 or, for float64 tensors, float64."""
    if c is None and n is None and m is None:
        return None
    if c is None or n is None or m is None:
        missing = "c_initial" if c is None else "n_initial" if n is None else "m_initial"
        raise ValueError(f"tfla: {missing} is missing; c_initial, n_initial and m_initial go together")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if m.shape != (q.shape[0], v.shape[1], 1):
        raise ValueError(f"tfla: m_initial has shape {tuple(m.shape)}; it must be {(q.shape[0], v.shape[1], 1)}")
    return c.to(dtype), n.to(dtype), m.to(dtype).squeeze(-1)


def run(
    operator: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: States | None,
    *,
    gate: InputGate,
    normalize: bool,
    eps: float,
    return_last_states: bool,
    autocast_kernel_dtype: torch.dtype | None = None,
    dtype_state: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """h, or (h, (C, N, M)). Inside torch.autocast q, k, v are cast to autocast_kernel_dtype, as theirs are."""
    device = q.device.type
    autocast: Any = contextlib.nullcontext()
    if autocast_kernel_dtype is not None and torch.is_autocast_enabled(device):
        q, k, v = (x.to(autocast_kernel_dtype) for x in (q, k, v))
        autocast = torch.autocast(device, enabled=False)
    with autocast:
        result = operator(
            q, k, v, i, f, gate=gate, normalizer="max" if normalize else "none", initial_state=state,
            output_final_state=return_last_states, eps=eps, layout="bhtd", **options,
        )  # fmt: skip
    if not return_last_states:
        return result
    h, last = result
    dtype = last.C.dtype if dtype_state is None else dtype_state
    return h, (last.C.to(dtype), last.n.to(dtype), last.m.to(dtype).unsqueeze(-1))
