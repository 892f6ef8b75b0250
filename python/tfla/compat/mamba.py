"""Functions of mamba_ssm for Mamba-2, with its signatures, on tfla.ssd and tfla.ssd_step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tfla
from tfla.nn.grouped_norm import grouped_rms_norm
from tfla.nn.short_conv import document_places, document_starts, short_convolution

__all__ = ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "selective_state_update"]

_NO_LIMIT = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """out (B,T,H,P), then the final states (B,H,P,N) and the states of every packed sequence, where asked for.

    Args:
        x: (B,T,H,P), the values.
        dt: (B,T,H); A: (H), negative; dt_bias: (H). dt becomes softplus(dt + dt_bias), if dt_softplus, within dt_limit.
        B, C: (B,T,G,N), shared by H / G heads each, in the dtype of x.
        chunk_size: spacing of stored states; any number.
        D: (H) or (H,P): out += D x. z: (B,T,H,P): out *= silu(z).
        initial_states: (B,H,P,N); with cu_seqlens one per sequence.
        seq_idx: (B,T): the state starts afresh where the number changes. An initial state belongs to sequence 0.
        cu_seqlens: (S+1), with a batch of 1: sequences packed one after another; here also without seq_idx.
        state_dtype: of the returned states. Default: float32, or float64 where x is.
    """
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("tfla: return_varlen_states is True without cu_seqlens, which says where sequences end")
    options: dict[str, Any] = {
        "D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "seq_idx": seq_idx,
        "cu_seqlens": cu_seqlens, "initial_state": initial_states, "chunk_size": chunk_size,
    }  # fmt: skip
    if not return_final_states and not return_varlen_states:
        return tfla.ssd(x, dt, A, B, C, **options)
    out, states = tfla.ssd(x, dt, A, B, C, output_final_state=True, **options)
    states = states if state_dtype is None else states.to(state_dtype)
    wanted = (states if cu_seqlens is None else states[-1:],) if return_final_states else ()
    return (out, *wanted, states) if return_varlen_states else (out, *wanted)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """All of a Mamba-2 layer behind its first projection: out (B,T,dim), or (B,T,out_dim) with outproj_weight; with
    return_final_states the pair of it and the states (B,H,P,N).

    Args:
        zxbcdt: (B,T, 2 M + 2 dim + 2 ngroups N + H), dim = H P: what a gated MLP of width M takes, whose results stand
            before those of the heads (M = 0 in the published layers), z, the inputs of the convolution, and dt.
        conv1d_weight: (dim + 2 ngroups N, W); conv1d_bias: (dim + 2 ngroups N).
        dt_bias, A: (H); D: (H,P), or (H) with headdim = P.
        seq_idx: (B,T): state and convolution start afresh where the number changes.
        activation: of the convolution: "silu", or "swish", which is the same.
        rmsnorm_weight: (dim): an RMS norm over each of the ngroups parts, of out * silu(z), or with norm_before_gate of
            out, times silu(z) then. None: no norm, out * silu(z).
    """
    if activation not in ("silu", "swish"):
        raise ValueError(f"tfla: activation is {activation!r}; it must be 'silu' or 'swish'")
    if outproj_bias is not None and outproj_weight is None:
        raise ValueError("tfla: outproj_bias is given without outproj_weight")
    if D.dim() == 1 and headdim is None:
        raise ValueError("tfla: headdim is missing; D has one axis, and does not say it")
    heads, head_dim = D.shape if D.dim() == 2 else (D.shape[0], headdim or 0)
    dim, channels = heads * head_dim, conv1d_weight.shape[0]
    beside = zxbcdt.shape[-1] - dim - channels - heads
    if (channels - dim) % (2 * ngroups) or channels < dim:
        raise ValueError(
            f"tfla: conv1d_weight has shape {tuple(conv1d_weight.shape)}; with {heads} heads of {head_dim} and "
            f"{ngroups} groups it must be ({dim} + {2 * ngroups} N, W)"
        )
    if beside < 0 or beside % 2:
        raise ValueError(
            f"tfla: zxbcdt has shape {tuple(zxbcdt.shape)}; its last axis must be {dim + channels + heads}, or an even "
            "number more"
        )
    mlp, z, xBC, dt = zxbcdt.split([beside, dim, channels, heads], dim=-1)
    places = None if seq_idx is None else document_places(document_starts(seq_idx))
    xBC = short_convolution(xBC, conv1d_weight.unsqueeze(1), conv1d_bias, None, places)
    x, B, C = xBC.split([dim, (channels - dim) // 2, (channels - dim) // 2], dim=-1)
    z_heads = z.unflatten(-1, (heads, head_dim)) if rmsnorm_weight is None else None
    options: dict[str, Any] = {
        "D": D, "z": z_heads, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit, "seq_idx": seq_idx,
        "initial_states": initial_states, "return_final_states": True, "state_dtype": state_dtype,
    }  # fmt: skip
    y, states = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, head_dim)), dt, A, B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1)),
        chunk_size, **options,
    )  # fmt: skip
    out = y.flatten(-2)
    if rmsnorm_weight is not None:
        out = grouped_rms_norm(out, rmsnorm_weight, z, rmsnorm_eps, ngroups, norm_before_gate)
    if beside:
        gate, value = mlp.chunk(2, dim=-1)
        out = torch.cat([F.silu(gate) * value, out], dim=-1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, states) if return_final_states else out


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token on states that are updated in place: out, shaped as x. No gradients.

    Args:
        state: (S,H,P,N), or (S,D,N) for D channels that are heads of one channel each. Any float dtype.
        x, dt, z: (B,H,P), or (B,D). dt counts as 0 below 0.
        A: (H,P,N), or (D,N), the same along N: an expanded view, or equal numbers.
        B, C: (B,G,N), or (B,N).
        D, dt_bias: (H,P), or (D).
        state_batch_indices: (B): the rows of state; -1 is padding, whose out is 0. None: row b on state b.

    A, dt and dt_bias that are expanded along P, as those of Mamba-2 are, make one decay for a head; otherwise every
    channel is a head of its own.
    """
    if state.dim() not in (3, 4):
        raise ValueError(f"tfla: state has shape {tuple(state.shape)}; it must be (S,H,P,N) or (S,D,N)")
    if A.shape != state.shape[1:]:
        raise ValueError(f"tfla: A has shape {tuple(A.shape)}; it must be {tuple(state.shape[1:])}")
    if dt.shape != x.shape:
        raise ValueError(f"tfla: dt has shape {tuple(dt.shape)}; it must be {tuple(x.shape)}, that of x")
    for name, given in (("D", D), ("dt_bias", dt_bias)):
        if given is not None and given.shape != state.shape[1:-1]:
            raise ValueError(f"tfla: {name} has shape {tuple(given.shape)}; it must be {tuple(state.shape[1:-1])}")
    if A.stride(-1) != 0 and not torch.equal(A, A[..., :1].expand_as(A)):
        raise ValueError("tfla: A varies along its last axis, as in Mamba-1; it must be the same for all N")
    A = A[..., 0]
    B, C = (given.unsqueeze(1) if given.dim() == 2 else given for given in (B, C))
    options: dict[str, Any] = {"dt_softplus": dt_softplus, "slots": state_batch_indices}
    if state.dim() == 4 and all(given is None or given.stride(-1) == 0 for given in (A, dt, dt_bias)):
        bias = None if dt_bias is None else dt_bias[..., 0]
        return tfla.ssd_step(
            x, dt[..., 0], A[..., 0], _like(B, x), _like(C, x), state, D=D, z=z, dt_bias=bias, **options
        )
    channels = state.contiguous().flatten(1, -2).unsqueeze(2)  # a view of a contiguous state
    D, dt_bias = (None if given is None else given.flatten() for given in (D, dt_bias))
    inner, outer = x.flatten(1).unsqueeze(-1), None if z is None else z.flatten(1).unsqueeze(-1)
    out = tfla.ssd_step(
        inner, dt.flatten(1), A.flatten(), _like(B, x), _like(C, x), channels, D=D, z=outer, dt_bias=dt_bias, **options
    )
    if not state.is_contiguous():
        state.copy_(channels.view(state.shape))
    return out.view(x.shape)


def _like(given: Tensor, x: Tensor) -> Tensor:
    """B and C may come in another dtype there."""
    return given.to(x.dtype)
