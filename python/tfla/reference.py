"""The operators token by token in float64, differentiated by PyTorch: what tests and self-check judge by.

It shares nothing with the kernels. Slow; for small inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfla._gates import log_forget, log_input
from tfla._options import DEFAULTS, DELTA, GATE_FAMILIES


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    gate: str = DEFAULTS.gate,
    normalizer: str | None = DEFAULTS.normalizer,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    qk_scale: float | None = DEFAULTS.qk_scale,
    eps: float = DEFAULTS.eps,
    soft_cap: float | None = DEFAULTS.soft_cap,
    exact_normalizer_grad: bool = DEFAULTS.exact_normalizer_grad,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """h and the last state for q, k (B,T,Hqk,dqk), v (B,T,H,dhv), i, f (B,T,H). Gradients hold m constant."""
    q, k, v, i, f = (x.double() for x in (q, k, v, i, f))
    batch, tokens, heads, dhv = v.shape
    dqk = q.shape[-1]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    family = GATE_FAMILIES[gate]
    normalizer = normalizer or family.normalizer
    log_i, log_f = log_input(family, i, soft_cap), log_forget(family, f, soft_cap)
    given = state or [v.new_zeros((batch, heads, dqk, dhv)[:axes]) for axes in (4, 3, 2)]
    C, n, m = (x.double() for x in given)
    m = m.detach()
    scale = dqk**-0.5 if qk_scale is None else qk_scale
    rows = []
    for t in range(tokens):
        largest = torch.maximum(log_f[:, t] + m, log_i[:, t]).detach()
        following = largest if family.has_max_state else torch.zeros_like(m)
        decay = torch.exp(log_f[:, t] + m - following)[..., None]
        weight = torch.exp(log_i[:, t] - following)[..., None]
        C = decay[..., None] * C + (weight * k[:, t])[..., None] * v[:, t, :, None, :]
        n = decay * n + weight * k[:, t]
        m = following
        scaled = scale * q[:, t]
        h = torch.einsum("bhd,bhde->bhe", scaled, C)
        if normalizer == "max":
            den = torch.maximum((scaled * n).sum(-1).abs(), torch.exp(-m)) + eps
            h = h / (den if exact_normalizer_grad else den.detach())[..., None]
        rows.append(h)
    h = torch.stack(rows, dim=1) if rows else v
    return h, (C, n, m)


def delta_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: str = DELTA.defaults.write,
    normalize_qk: bool = DELTA.defaults.normalize_qk,
    state: Tensor | None = None,
    qk_scale: float | None = DELTA.defaults.qk_scale,
) -> tuple[Tensor, Tensor]:
    """h and the last state of the delta rule for q, k (B,T,Hqk,dqk), v (B,T,H,dhv), beta, g (B,T,H)."""
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    batch, tokens, heads, dhv = v.shape
    if normalize_qk:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    strength = beta if write == "plain" else torch.sigmoid(beta) * (2 if write == "twice_sigmoid" else 1)
    log_decay = torch.zeros_like(beta) if g is None else g.double()
    if A_log is not None:
        dt = log_decay if dt_bias is None else log_decay + dt_bias.double()
        log_decay = -torch.exp(A_log.double()) * torch.nn.functional.softplus(dt)
    scale = q.shape[-1] ** -0.5 if qk_scale is None else qk_scale
    C = v.new_zeros(batch, heads, q.shape[-1], dhv) if state is None else state.double()
    rows = []
    for t in range(tokens):
        C = torch.exp(log_decay[:, t])[..., None, None] * C
        residual = v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], C)
        C = C + torch.einsum("bhd,bhe->bhde", strength[:, t, :, None] * k[:, t], residual)
        rows.append(torch.einsum("bhd,bhde->bhe", scale * q[:, t], C))
    h = torch.stack(rows, dim=1) if rows else v
    return h, C


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; NaN where either has one, so that no bound holds."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = torch.linalg.vector_norm(actual - expected)
    size = torch.linalg.vector_norm(expected)
    return float(difference / size) if size > 0 else float(difference)


# Relative errors allowed: of values, of gradients. Those of docs/numerics.md; for 16-bit types half a unit in the last
# place of the result, which is what a tensor of few elements may be off by, plus the float32 arithmetic.
BOUNDS = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (2**-8 + 1e-5, 2**-8 + 1e-4),
    torch.float16: (2**-11 + 1e-5, 2**-11 + 1e-4),
}
