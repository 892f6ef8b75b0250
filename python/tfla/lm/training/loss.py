"""Cross-entropy of capped logits without ever holding the logits of all tokens.

A batch of 65,536 tokens has 13 GB of float32 logits for the paper's vocabulary. Tokens are taken in slices: logits,
loss and, in training, gradients of one slice at a time, so nothing is computed twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORED = -1  # a target that does not count
SLICE = 8192
Slice = Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


def _losses(logits: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    """Of each token, in float32 (float64 for float64 logits)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    capped = wide if cap is None else cap * torch.tanh(wide / cap)
    picked = capped.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == IGNORED, 0.0, torch.logsumexp(capped, dim=1) - picked)


def _losses_and_gradient(logits: Tensor, targets: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """The sum of losses of a slice and its gradient for the logits, in their dtype."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    tanh = None if cap is None else torch.tanh(wide / cap)
    capped = wide if cap is None or tanh is None else cap * tanh
    total = torch.logsumexp(capped, dim=1, keepdim=True)
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    counts = (targets != IGNORED)[:, None]
    loss = torch.where(counts, total - torch.where(chosen, capped, 0.0).sum(1, keepdim=True), 0.0).sum()
    gradient = torch.exp(capped - total) - chosen.to(wide.dtype)
    if tanh is not None:
        gradient = gradient * (1 - tanh * tanh)
    return loss, torch.where(counts, gradient, 0.0).to(logits.dtype)


@functools.cache
def _compiled() -> Slice:
    return torch.compile(_losses_and_gradient, dynamic=False)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, compiled: bool) -> Tensor:
        each: Slice = _compiled() if compiled else _losses_and_gradient
        w = weight.to(x.dtype)
        loss = torch.zeros((), device=x.device, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        # Sums over slices go into the master weights' own dtype.
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        for begin in range(0, x.shape[0], SLICE):
            rows = slice(begin, begin + SLICE)
            part, gradient = each(x[rows] @ w.t(), targets[rows], cap)
            loss += part
            torch.mm(gradient, w, out=dx[rows])
            dw += gradient.t() @ x[rows]
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        # A tensor of no axes does not change the dtype of the other factor, and is not rounded to it either.
        return dx * grads[0], dw * grads[0], None, None, None


def cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None, *, compiled: bool = False
) -> Tensor:
    """The sum of losses over tokens: x (N,D), weight (V,D), targets (N), those that are -1 left out."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _CrossEntropy.apply(x, weight, targets, cap, compiled)
    return token_losses(x, weight, targets, cap).sum()


@torch.no_grad()
def token_losses(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """The loss of each token (N), 0 where the target is -1; no gradient."""
    w = weight.to(x.dtype)
    rows = zip(x.split(SLICE), targets.split(SLICE), strict=True)
    return torch.cat([_losses(part @ w.t(), target, cap) for part, target in rows])
