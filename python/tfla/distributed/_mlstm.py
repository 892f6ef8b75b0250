"""The mLSTM over several devices.

Rank r holds the r-th stretch of tokens. With b the sum of log f over a stretch, a state passes through it by

    C_after = exp(b + m_before - m_after) C_before + exp(m_own - m_after) C_own

where (C_own, m_own) is what the stretch makes of a state of nothing. So every rank computes its own state, one
all-gather of (C, n, m, b) tells all of them, each merges those before it, and runs its tokens from there. In backward
the same happens in the other direction with the gradients of the states. The merge is exact: results are those of one
device up to rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tfla._gates import log_forget
from tfla._options import CODES, DEFAULTS, GATE_FAMILIES, Gate, GateFamily, Keep, Layout, Normalizer, encode_all
from tfla._torch import derivatives, fast_path, operators
from tfla._torch.autocast import autocast
from tfla.distributed._gather import all_gather, refuse_state_elsewhere
from tfla.ops import InitialState, State, _parts

# The max state of nothing, where there is one: so low that what an input gate brings is above it or nothing too.
_NOTHING = -1e3


@torch.compiler.disable  # the collectives stay outside of compiled graphs
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    gate: Gate = DEFAULTS.gate,
    normalizer: Normalizer | None = DEFAULTS.normalizer,
    initial_state: InitialState | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = DEFAULTS.chunk_size,
    qk_scale: float | None = DEFAULTS.qk_scale,
    eps: float = DEFAULTS.eps,
    soft_cap: float | None = DEFAULTS.soft_cap,
    layout: Layout = DEFAULTS.layout,
    exact_normalizer_grad: bool = DEFAULTS.exact_normalizer_grad,
    keep: Keep = DEFAULTS.keep,
) -> Tensor | tuple[Tensor, State]:
    """`tfla.mlstm` of a sequence whose tokens are spread over the ranks of `group`, in the order of ranks.

    Every rank of the group calls it, with its own stretch of tokens: q, k, v, i, f and h are local. Stretches may
    differ in length; B, H, dqk, dhv, dtypes and options must be the same. Backward is a collective call too: all ranks
    run it, in the same order. Documents are separated by a forget gate of -inf at their first token (there is no
    cu_seqlens).

    Args:
        group: a process group of torch.distributed: NCCL for CUDA tensors, gloo for CPU; None is the default group.
        initial_state: the state before the whole sequence, on the first rank alone; gradients arrive there.
        output_final_state: also return the state after the whole sequence, on every rank, without gradients.
        Everything else: as in `tfla.mlstm`.
    """
    given = (
        gate, normalizer, layout, eps, qk_scale, soft_cap, exact_normalizer_grad, chunk_size, keep,
        DEFAULTS.formulation,
    )  # fmt: skip
    options = encode_all(given)
    q, k, v = autocast(q, k, v)
    refuse_state_elsewhere(initial_state, group)
    C, n, m = _parts(initial_state)
    if dist.get_world_size(group) == 1:
        one = derivatives.call if torch.compiler.is_compiling() else fast_path.call
        h, *final = one(operators.forward_with_state, (q, k, v, i, f, C, n, m, None, *options))
    else:
        inputs = (q, k, v, i, f, C, n)
        saves = derivatives.trains(inputs) and derivatives.keeps(q)
        call = _Call(GATE_FAMILIES[gate], CODES.layout[layout], soft_cap, options, saves)
        h, *final = _ContextParallel.apply(group, call, m, *inputs)
    return (h, State(*final).detach()) if output_final_state else h


class _Call(NamedTuple):
    family: GateFamily
    head_first: bool
    soft_cap: float | None
    options: tuple  # all of them, as operators take them
    saves: bool  # whether forward keeps something for backward

    def forward(self, operator: Any, *inputs: Any) -> tuple[Any, Tensor | None]:
        """The results of an operator whose h has a backward, and what is saved for it."""
        operator = operators.SAVING[operator] if self.saves else operator
        return derivatives.without_saved(operator, operator(*inputs, None, *self.options))


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, call: _Call, m: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *tokens, C, n = inputs
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        # The first stretch begins from the given state, so its own state is that of one device, and so is its h.
        start = (C, n, m) if rank == 0 else _state_of_nothing(tokens, call)
        if rank == 0:
            (h, *own), saved = call.forward(operators.forward_with_state, *tokens, *start)
        else:
            _, *own = operators.forward_with_state(*tokens, *start, None, *call.options)
        everyone = all_gather([*own, _log_decay(tokens[4], call)], group)
        boundaries = _merge(everyone, has_max_state=call.family.has_max_state)
        if rank > 0:
            start = boundaries[rank - 1]
            h, saved = call.forward(operators.forward, *tokens, *start)
        ctx.save_for_backward(saved, *tokens, *start)
        ctx.group, ctx.call, ctx.decays = group, call, _boundary_decays(everyone, boundaries)
        ctx.mark_non_differentiable(*boundaries[ranks - 1])
        ctx.set_materialize_grads(False)
        return h, *boundaries[ranks - 1]

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *_: Any) -> tuple:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "tfla: distributed.mlstm was asked for a second derivative; it has first derivatives only"
            )
        saved, *tokens, C, n, m = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        if dh is None:  # the other ranks wait for this one
            dh = torch.zeros_like(tokens[2], memory_format=torch.contiguous_format)

        def gradients(dC: Tensor | None, dn: Tensor | None) -> tuple[Tensor, ...]:
            return operators.backward(dh, dC, dn, saved, *tokens, C, n, m, None, *ctx.call.options)

        # What this stretch alone wants of the state it began from; nobody needs that of the first.
        if rank > 0:
            grads = gradients(None, None)
            own = grads[5:]
        else:
            own = tuple(torch.zeros_like(x) for x in _state_of_nothing(tokens, ctx.call)[:2])
        everyone = all_gather(own, ctx.group)
        if rank < ranks - 1:
            grads = gradients(*_merge_gradients(everyone, ctx.decays, rank))
        initial = grads[5:] if rank == 0 and C is not None else (None, None)
        return (None, None, None, *grads[:5], *initial)


def _state_of_nothing(tokens: list[Tensor], call: _Call) -> State:
    q, _, v, *_ = tokens
    batch, heads = v.shape[0], v.shape[1 if call.head_first else 2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = State.zeros(batch, heads, q.shape[3], v.shape[3], device=q.device, dtype=dtype)
    if call.family.has_max_state:
        state.m.fill_(_NOTHING)
    return state


def _log_decay(f: Tensor, call: _Call) -> Tensor:
    """(B,H) in double: the sum of log f over this rank's tokens."""
    return log_forget(call.family, f.double(), call.soft_cap).sum(2 if call.head_first else 1)


def _merge(everyone: list[list[Tensor]], has_max_state: bool) -> list[State]:
    """The state after each rank's tokens, from (C, n, m, b) of every rank."""
    C, n, m = (x.clone() for x in everyone[0][:3])  # may be kept for backward, and the rest of the buffer is not to be
    after = [State(C, n, m)]
    for own_C, own_n, own_m, b in everyone[1:]:
        # Without a max state m stays 0.
        following = torch.maximum(b + m, own_m.double()).to(m.dtype) if has_max_state else own_m
        kept = torch.exp(b + m - following).to(C.dtype)[..., None]
        added = torch.exp(own_m.double() - following).to(C.dtype)[..., None]
        C = kept[..., None] * C + added[..., None] * own_C
        n = kept * n + added * own_n
        m = following
        after.append(State(C, n, m))
    return after


def _boundary_decays(everyone: list[list[Tensor]], after: list[State]) -> list[Tensor]:
    """decays[r]: what rank r's tokens leave of the state before them, in the scale of that state and of the next."""
    first = torch.zeros_like(after[0].m)  # never used: no gradient passes through the first stretch
    return [first] + [
        torch.exp(everyone[r][3] + after[r - 1].m - after[r].m).to(first.dtype) for r in range(1, len(after))
    ]


def _merge_gradients(everyone: list[list[Tensor]], decays: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """The gradient of the state after `rank`, from what every later rank wants of the state before it."""
    dC, dn = everyone[-1]
    for r in range(len(everyone) - 2, rank, -1):
        decay = decays[r][..., None]
        dC = everyone[r][0] + decay[..., None] * dC
        dn = everyone[r][1] + decay * dn
    return dC, dn
