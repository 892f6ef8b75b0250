"""The layer of Mamba-2: one projection, a short convolution, the state space dual, a gated norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import tfla
from tfla.nn.cell import Mode
from tfla.nn.grouped_norm import GroupedRMSNorm
from tfla.nn.linear import Linear
from tfla.nn.mamba2_state import Mamba2State
from tfla.nn.short_conv import Places, ShortConvolution, document_places, document_starts, packed_places


class Mamba2(nn.Module):
    """x (B,T,d_model) -> the same.

        layer = Mamba2(d_model=512)
        y = layer(x)                        # training
        y, state = layer.prefill(prompt)    # a prompt of any length, and the state after it
        y = layer.decode(x, state)          # one token (B,d_model) or a few (B,T,d_model); state is updated in place

    Parameters have the names and shapes of mamba_ssm's Mamba2, so that published state_dicts load.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        *,
        A_init_range: tuple[float, float] = (1.0, 16.0),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        chunk_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """expand: d_model times it are the channels of all heads, of headdim each. ngroups: heads that share B and C,
        and channels that share a norm. A_init_range, dt_min, dt_max: where exp(A_log) and softplus(dt_bias) begin,
        uniform and log-uniform over heads, the latter not below dt_init_floor. D_has_hdim: a D for each channel.
        rmsnorm: norm(y silu(z)), or with norm_before_gate norm(y) silu(z); without it y silu(z).
        """
        super().__init__()
        inner = expand * d_model
        if headdim < 1 or inner % headdim:
            raise ValueError(f"tfla: headdim is {headdim}; it must divide expand * d_model, {inner}")
        heads = inner // headdim
        if ngroups < 1 or heads % ngroups:
            raise ValueError(f"tfla: ngroups is {ngroups}; it must be a positive divisor of the heads, {heads}")
        if d_conv < 1:
            raise ValueError(f"tfla: d_conv is {d_conv}; it must be positive")
        if not 0 < A_init_range[0] <= A_init_range[1]:
            raise ValueError(f"tfla: A_init_range is {A_init_range}; it must rise from above 0, since A is negative")
        self.d_inner, self.d_state, self.nheads, self.headdim, self.ngroups = inner, d_state, heads, headdim, ngroups
        self.A_init_range, self.dt_range, self.dt_init_floor = A_init_range, (dt_min, dt_max), dt_init_floor
        self.dt_limit, self.chunk_size = dt_limit, chunk_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        channels = inner + 2 * ngroups * d_state
        self.in_proj = Linear(d_model, inner + channels + heads, bias=bias, **factory)  # z, x, B, C, dt
        self.conv1d = ShortConvolution(channels, d_conv, conv_bias, **factory)
        # Decays of nearly 1 over thousands of tokens: 16 bits would round them.
        wide: dict[str, Any] = {"device": device, "dtype": torch.float64 if dtype == torch.float64 else torch.float32}
        self.dt_bias, self.A_log = nn.Parameter(torch.empty(heads, **wide)), nn.Parameter(torch.empty(heads, **wide))
        self.D = nn.Parameter(torch.empty(inner if D_has_hdim else heads, **wide))
        self.norm = GroupedRMSNorm(inner, ngroups, norm_eps, norm_before_gate, **factory) if rmsnorm else None
        self.out_proj = Linear(inner, d_model, bias=bias, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Of this module alone; its parts have their own, as for modules made on the device meta."""
        self.A_log.uniform_(*self.A_init_range).log_()
        dt = self.dt_bias.uniform_(*map(math.log, self.dt_range)).exp_().clamp_(min=self.dt_init_floor)
        dt.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        self.D.fill_(1)

    def forward(
        self,
        x: Tensor,
        state: Mamba2State | None = None,
        *,
        mode: Mode = "train",
        cu_seqlens: Tensor | None = None,
        slots: Tensor | None = None,
        starts: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Mamba2State]:
        """y; with mode "prefill" the pair (y, state). All modes come through here, so that hooks (FSDP) see them.

        starts (B,T) bool, in training: first tokens of documents, where the state begins anew. seq_idx (B,T) integers
        says the same as mamba_ssm does: a document begins where the number changes.
        """
        self._check_mode(mode, state, cu_seqlens, slots, starts, seq_idx)
        one_token = mode == "decode" and x.dim() == 2
        if one_token:
            x = x.unsqueeze(1)
        if seq_idx is not None:
            starts = document_starts(seq_idx)
        channels = self.conv1d.in_channels
        z, xBC, dt = self.in_proj(x).split([self.d_inner, channels, self.nheads], dim=-1)
        xBC, inputs = self._convolved(xBC, state, mode, cu_seqlens, slots, starts)
        y, after = self._ssd(xBC, dt, z, state, inputs, mode, cu_seqlens, slots, starts)
        y = self.out_proj(y if self.norm is None else self.norm(y, z))
        if one_token:
            y = y.squeeze(1)
        return y if after is None else (y, after)

    def _check_mode(
        self, mode: Mode, state: Mamba2State | None, cu_seqlens: Tensor | None, slots: Tensor | None,
        starts: Tensor | None, seq_idx: Tensor | None,
    ) -> None:  # fmt: skip
        if mode not in ("train", "prefill", "decode"):
            raise ValueError(f"tfla: mode is {mode!r}; it must be 'train', 'prefill' or 'decode'")
        if mode == "decode" and (state is None or cu_seqlens is not None):
            raise ValueError("tfla: mode is 'decode', which needs state and takes no cu_seqlens")
        if slots is not None and mode != "decode":
            raise ValueError(f"tfla: slots is given with mode {mode!r}; only 'decode' takes slots")
        if starts is not None and seq_idx is not None:
            raise ValueError("tfla: starts and seq_idx are both given; either says where documents begin")
        if (starts is not None or seq_idx is not None) and (
            mode != "train" or state is not None or cu_seqlens is not None
        ):
            name = "starts" if seq_idx is None else "seq_idx"
            raise ValueError(
                f"tfla: {name} is given with mode {mode!r}, state or cu_seqlens; only 'train' takes it, alone"
            )

    def _convolved(
        self, xBC: Tensor, state: Mamba2State | None, mode: Mode, cu_seqlens: Tensor | None, slots: Tensor | None,
        starts: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """xBC behind the convolution, and what a prompt leaves of its inputs; in decoding the state has it then."""
        places: Places | None = None
        if cu_seqlens is not None:
            places = packed_places(cu_seqlens, xBC.shape[1])
        elif starts is not None:
            places = document_places(starts)
        if mode == "decode":
            assert state is not None
            return self.conv1d.step(xBC, state.xBC, slots), None
        past = None if state is None else state.xBC
        made = self.conv1d(xBC, past, places)
        return made, None if mode == "train" else self.conv1d.last(xBC, past, places).to(self._wide())

    def _ssd(
        self, xBC: Tensor, dt: Tensor, z: Tensor, state: Mamba2State | None, inputs: Tensor | None, mode: Mode,
        cu_seqlens: Tensor | None, slots: Tensor | None, starts: Tensor | None,
    ) -> tuple[Tensor, Mamba2State | None]:  # fmt: skip
        """y (B,T,H*P), gated where no norm does that, and the state after a prompt."""
        x, B, C = xBC.split([self.d_inner, *[self.ngroups * self.d_state] * 2], dim=-1)
        x, z = (part.unflatten(-1, (self.nheads, self.headdim)) for part in (x, z))
        B, C = (part.unflatten(-1, (self.ngroups, self.d_state)) for part in (B, C))
        options: dict[str, Any] = {
            "D": self.D if self.D.shape == dt.shape[-1:] else self.D.view(self.nheads, self.headdim),
            "z": z if self.norm is None else None, "dt_bias": self.dt_bias, "dt_softplus": True,
            "dt_limit": self.dt_limit,
        }  # fmt: skip
        A = -self.A_log.to(self._wide()).exp()
        if mode == "decode":
            assert state is not None
            return tfla.ssd_step(x, dt, A, B, C, state.S, slots=slots, **options).flatten(-2), None
        options |= {"cu_seqlens": cu_seqlens, "chunk_size": self.chunk_size}
        options["initial_state"] = None if state is None else state.S
        if mode == "train":
            numbers = None if starts is None else starts.cumsum(1)
            return tfla.ssd(x, dt, A, B, C, seq_idx=numbers, **options).flatten(-2), None
        assert inputs is not None
        y, S = tfla.ssd(x, dt, A, B, C, output_final_state=True, **options)
        return y.flatten(-2), Mamba2State(S, inputs)

    def prefill(
        self, x: Tensor, state: Mamba2State | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Mamba2State]:
        """y and the state after the last token of x, beginning from `state`."""
        return self(x, state, mode="prefill", cu_seqlens=cu_seqlens)

    def decode(self, x: Tensor, state: Mamba2State, *, slots: Tensor | None = None) -> Tensor:
        """y for new tokens, (B,d_model) or (B,T,d_model); state, or its rows `slots`, change in place. No gradients."""
        return self(x, state, mode="decode", slots=slots)

    def new_state(self, sequences: int) -> Mamba2State:
        """The state before the first token, where the layer's parameters are."""
        options: dict[str, Any] = {"device": self.out_proj.weight.device, "dtype": self._wide()}
        S = torch.zeros(sequences, self.nheads, self.headdim, self.d_state, **options)
        return Mamba2State(S, torch.zeros(sequences, self.conv1d.before, self.conv1d.in_channels, **options))

    def _wide(self) -> torch.dtype:
        """Of states: that of the operator's. Inputs of 16 bits are kept in it exactly."""
        return torch.float64 if self.out_proj.weight.dtype == torch.float64 else torch.float32

    def extra_repr(self) -> str:
        return (
            f"nheads={self.nheads}, headdim={self.headdim}, d_state={self.d_state}, ngroups={self.ngroups}, "
            f"dt_limit={self.dt_limit}"
        )
