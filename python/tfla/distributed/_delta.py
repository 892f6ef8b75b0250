"""The delta rule over several devices.

A stretch of tokens makes M C + B of a state C: it is linear in it. M (dqk,dqk) is what the decay of the mLSTM becomes.
Columns of a state do not depend on each other, so that one call has both: with the values [v, 0] and the initial state
[0, I] the last state is [B, M]. One all-gather tells all ranks, each applies the stretches before it, and runs its
tokens from there. In backward the gradients of states pass through the transposed M. The join is exact: results are
those of one device up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tfla._options import DELTA, Layout, Write
from tfla._torch import delta as operators
from tfla._torch.autocast import autocast
from tfla.distributed._gather import all_gather, refuse_state_elsewhere

_DEFAULTS = DELTA.defaults


@torch.compiler.disable  # the collectives stay outside of compiled graphs
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: Write = _DEFAULTS.write,
    normalize_qk: bool = _DEFAULTS.normalize_qk,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = _DEFAULTS.chunk_size,
    qk_scale: float | None = _DEFAULTS.qk_scale,
    layout: Layout = _DEFAULTS.layout,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tfla.delta_rule` of a sequence whose tokens are spread over the ranks of `group`, in the order of ranks.

    Every rank of the group calls it, with its own stretch of tokens: q, k, v, beta, g and h are local. Stretches may
    differ in length; B, H, dqk, dhv, dtypes and options must be the same. Backward is a collective call too: all ranks
    run it, in the same order. Documents are separated by a g of -inf at their first token (there is no cu_seqlens).

    Args:
        group: a process group of torch.distributed; None is the default group.
        A_log, dt_bias: the same on every rank. Their gradients are those of a rank's own tokens: add them up over the
            ranks, as data parallel training does with parameters.
        initial_state: the state before the whole sequence, on the first rank alone; gradients arrive there.
        output_final_state: also return the state after the whole sequence, on every rank, without gradients.
        Everything else: as in `tfla.delta_rule`.
    """
    options = DELTA.encode_all((write, normalize_qk, layout, qk_scale, chunk_size))
    q, k, v = autocast(q, k, v)
    refuse_state_elsewhere(initial_state, group)
    inputs = (q, k, v, beta, g, A_log, dt_bias, initial_state)
    if dist.get_world_size(group) == 1:
        h, final = operators.call(operators.forward_with_state, (*inputs, None, *options))
    else:
        h, final = _ContextParallel.apply(group, options, layout == "bhtd", *inputs)
    return (h, final.detach()) if output_final_state else h


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, options: tuple, head_first: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tokens, C = inputs
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        # The first stretch begins from the given state, so its last state is that of one device, and so is its h.
        if rank == 0:
            h, after = operators.forward_with_state(*tokens, C, None, *options)
            map_of_tokens = torch.cat([after, torch.zeros_like(_identity(tokens, head_first))], dim=-1)
        else:
            map_of_tokens = _map(tokens, options, head_first)
        everyone = [own for (own,) in all_gather([map_of_tokens], group)]
        states, maps = _join(everyone, tokens[2].shape[-1])
        if rank > 0:
            C = states[rank - 1]
            h = operators.forward(*tokens, C, None, *options)
        ctx.save_for_backward(*tokens, C)
        ctx.group, ctx.options, ctx.maps = group, options, maps
        ctx.mark_non_differentiable(states[ranks - 1])
        ctx.set_materialize_grads(False)
        return h, states[ranks - 1]

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *_: Any) -> tuple:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "tfla: distributed.delta_rule was asked for a second derivative; it has first derivatives only"
            )
        inputs = ctx.saved_tensors
        *tokens, C = inputs
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        if dh is None:  # the other ranks wait for this one
            dh = torch.zeros_like(tokens[2], memory_format=torch.contiguous_format)

        def gradients(dC: Tensor | None) -> tuple[Tensor, ...]:
            return operators.backward(dh, dC, *inputs, None, *ctx.options)

        # What this stretch alone wants of the state it began from; nobody needs that of the first.
        if rank > 0:
            grads = gradients(None)
            own = grads[-1]
        else:
            batch, heads, dqk = ctx.maps[1].shape[:3]
            own = ctx.maps[1].new_zeros(batch, heads, dqk, tokens[2].shape[-1])
        everyone = [wanted for (wanted,) in all_gather([own], ctx.group)]
        if rank < ranks - 1:
            dC = everyone[-1]
            for r in range(ranks - 2, rank, -1):
                dC = everyone[r] + ctx.maps[r].mT @ dC
            grads = gradients(dC)
        given = (None if x is None else grad for x, grad in zip(inputs, grads, strict=True))
        *of_tokens, of_state = given
        return (None, None, None, *of_tokens, of_state if rank == 0 else None)


def _identity(tokens: list[Tensor], head_first: bool) -> Tensor:
    """(B,H,dqk,dqk), as states are."""
    q, _, v, *_ = tokens
    batch, heads, dqk = v.shape[0], v.shape[1 if head_first else 2], q.shape[-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.eye(dqk, dtype=dtype, device=q.device).expand(batch, heads, dqk, dqk)


def _map(tokens: list[Tensor], options: tuple, head_first: bool) -> Tensor:
    """[B, M] of these tokens, (B,H,dqk,dhv+dqk)."""
    q, k, v, *gates = tokens
    identity = _identity(tokens, head_first)
    nothing = identity.new_zeros(*identity.shape[:-1], v.shape[-1])
    values = torch.cat([v, v.new_zeros(*v.shape[:-1], q.shape[-1])], dim=-1)
    start = torch.cat([nothing, identity], dim=-1)
    _, after = operators.forward_with_state(q, k, values, *gates, start, None, *options)
    return after


def _join(everyone: list[Tensor], dhv: int) -> tuple[list[Tensor], list[Tensor]]:
    """The state after each rank's tokens, and the M of every rank but the first, which is never used."""
    maps = [own[..., dhv:] for own in everyone]
    states = [everyone[0][..., :dhv].contiguous()]
    for own, M in zip(everyone[1:], maps[1:], strict=True):
        states.append(M @ states[-1] + own[..., :dhv])
    return states, maps
