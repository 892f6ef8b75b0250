"""Random arguments of Mamba-2's state space dual, and its recurrence token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, TOKENS, HEADS, GROUPS, P, N = 2, 41, 4, 2, 6, 8
WITHOUT_TOKENS = ("A", "D", "dt_bias")
Given = dict[str, Tensor]


def naive(x, dt, A, B, C, D=None, z=None, dt_bias=None, state=None, seq_idx=None, softplus=False, limit=None):
    """y and the last state, differentiated by PyTorch."""
    batch, tokens, heads, _ = x.shape
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    dt = dt.clamp(*(limit or (0.0, None)))
    S = x.new_zeros(batch, heads, x.shape[3], B.shape[3]) if state is None else state
    rows, before = [], torch.zeros(batch, dtype=torch.long)
    for t in range(tokens):
        if seq_idx is not None:
            S = torch.where((seq_idx[:, t] == before)[:, None, None, None], S, torch.zeros_like(S))
            before = seq_idx[:, t]
        S = (
            torch.exp(dt[:, t] * A)[..., None, None] * S
            + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        )
        rows.append(torch.einsum("bhpn,bhn->bhp", S, C[:, t]))
    y = torch.stack(rows, 1)
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    return (y if z is None else y * F.silu(z)), S


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def tensors(dtype, batch=BATCH, positive_dt=False) -> Given:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    dt = draw(batch, TOKENS, HEADS)
    return {
        "x": draw(batch, TOKENS, HEADS, P).to(dtype),
        "dt": (dt.abs() if positive_dt else dt).to(wide(dtype)),
        "A": -torch.exp(draw(HEADS)).to(wide(dtype)),
        "B": draw(batch, TOKENS, GROUPS, N).to(dtype),
        "C": draw(batch, TOKENS, GROUPS, N).to(dtype),
    }


def extras(dtype, names, batch=BATCH) -> Given:
    """Of D, D2 (H,P), z, dt_bias, state those that are named."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "D": (HEADS,), "D2": (HEADS, P), "z": (batch, TOKENS, HEADS, P), "dt_bias": (HEADS,),
        "state": (batch, HEADS, P, N),
    }  # fmt: skip
    found = {}
    for name, shape in shapes.items():
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if name in names:
            found[name.removesuffix("2")] = drawn.to(dtype if name == "z" else wide(dtype))
    return found


def leaves(given: Given, dtype: torch.dtype | None = None) -> Given:
    return {name: x.detach().to(dtype or x.dtype).clone().requires_grad_() for name, x in given.items()}


def at(given: Given, index) -> Given:
    """With tokens picked from what has them."""
    return {name: x if name in WITHOUT_TOKENS else x[:, index] for name, x in given.items()}
