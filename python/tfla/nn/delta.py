"""The layer of Gated DeltaNet and of DeltaNet: a short convolution, the delta rule, a gated norm."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tfla
from tfla.nn.cell import Mode
from tfla.nn.delta_state import DeltaState
from tfla.nn.linear import Linear, fused, unchanged
from tfla.nn.short_conv import Places, ShortConvolution, document_places, packed_places


class GatedRMSNorm(nn.Module):
    """RMS norm over the last axis, times silu(gate) where there is one."""

    def __init__(self, dim: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight.to(x.dtype)
        return y if gate is None else y * F.silu(gate)


class GatedDeltaNet(nn.Module):
    """x (B,T,d_model) -> the same: projections, short convolutions, the gated delta rule, norm, output projection.

        layer = GatedDeltaNet(d_model=512, num_heads=3, head_dim=128)
        y = layer(x)                        # training
        y, state = layer.prefill(prompt)    # a prompt of any length, and the state after it
        y = layer.decode(x, state)          # one token (B,d_model) or a few (B,T,d_model); state is updated in place

    Parameters have the names and shapes of flash-linear-attention's GatedDeltaNet, and with use_decay=False of its
    DeltaNet, so that state_dicts of either load. On the CPU, where the operator has kernels.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        expand_v: float = 2.0,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_decay: bool = True,
        allow_neg_eigval: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int | None = None,
        A_range: tuple[float, float] = (1.0, 16.0),
        dt_range: tuple[float, float] = (1e-3, 0.1),
        fuse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """head_dim: of queries and keys; default 3/4 of d_model for all heads. expand_v: head dimension of values, as a
        multiple of it. num_v_heads: a multiple of num_heads, which share queries and keys. allow_neg_eigval: the write
        strength is 2 sigmoid, not sigmoid. A_range, dt_range: where exp(A_log) and softplus(dt_bias) begin, uniform and
        log-uniform over value heads. fuse: one product for all projections of x in training.
        """
        super().__init__()
        head_dim = 3 * d_model // (4 * num_heads) if head_dim is None else head_dim
        v_heads = num_heads if num_v_heads is None else num_v_heads
        if head_dim < 1 or round(head_dim * expand_v) < 1 or not math.isclose(head_dim * expand_v % 1, 0, abs_tol=1e-5):
            raise ValueError(f"tfla: expand_v is {expand_v}; times head_dim {head_dim} it must be a positive integer")
        if v_heads < 1 or v_heads % num_heads:
            raise ValueError(
                f"tfla: num_v_heads is {v_heads}; it must be a positive multiple of num_heads, {num_heads}"
            )
        if conv_size < 1:
            raise ValueError(f"tfla: conv_size is {conv_size}; it must be positive")
        self.num_heads, self.num_v_heads, self.head_dim = num_heads, v_heads, head_dim
        self.head_v_dim = round(head_dim * expand_v)
        self.use_gate, self.use_decay, self.use_short_conv, self.fuse = use_gate, use_decay, use_short_conv, fuse
        self.allow_neg_eigval, self.chunk_size = allow_neg_eigval, chunk_size
        self.A_range, self.dt_range = A_range, dt_range
        key_dim, value_dim = num_heads * head_dim, v_heads * self.head_v_dim
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return Linear(inputs, outputs, bias=False, **factory)

        self.q_proj, self.k_proj = linear(d_model, key_dim), linear(d_model, key_dim)
        self.v_proj, self.b_proj = linear(d_model, value_dim), linear(d_model, v_heads)
        if use_decay:
            self.a_proj = linear(d_model, v_heads)
            # Decays of nearly 1 over thousands of tokens: 16 bits would round them.
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            self.A_log = nn.Parameter(torch.empty(v_heads, device=device, dtype=wide))
            self.dt_bias = nn.Parameter(torch.empty(v_heads, device=device, dtype=wide))
        if use_short_conv:
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                ShortConvolution(channels, conv_size, conv_bias, **factory)
                for channels in (key_dim, key_dim, value_dim)
            )
        if use_gate:
            self.g_proj = linear(d_model, value_dim)
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, **factory)
        self.o_proj = linear(value_dim, d_model)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Of this module alone; its parts have their own, as for modules made on the device meta."""
        if not self.use_decay:
            return
        self.A_log.uniform_(*self.A_range).log_()
        dt = self.dt_bias.uniform_(*map(math.log, self.dt_range)).exp_()
        dt.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt

    def forward(
        self,
        x: Tensor,
        state: DeltaState | None = None,
        *,
        mode: Mode = "train",
        cu_seqlens: Tensor | None = None,
        slots: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, DeltaState]:
        """y; with mode "prefill" the pair (y, state). All modes come through here, so that hooks (FSDP) see them.

        starts (B,T) bool, in training: first tokens of documents, where the state begins anew.
        """
        if mode not in ("train", "prefill", "decode"):
            raise ValueError(f"tfla: mode is {mode!r}; it must be 'train', 'prefill' or 'decode'")
        if mode == "decode" and (state is None or cu_seqlens is not None or starts is not None):
            raise ValueError("tfla: mode is 'decode', which needs state and takes no cu_seqlens or starts")
        if slots is not None and mode != "decode":
            raise ValueError(f"tfla: slots is given with mode {mode!r}; only 'decode' takes slots")
        if starts is not None and (mode != "train" or cu_seqlens is not None):
            raise ValueError(f"tfla: starts is given with mode {mode!r} or cu_seqlens; only 'train' takes it, alone")
        one_token = mode == "decode" and x.dim() == 2
        if one_token:
            x = x.unsqueeze(1)
        q, k, v, beta, a, gate = self._projections(x, mode)
        q, k, v, inputs = self._convolved(q, k, v, state, mode, cu_seqlens, slots, starts)
        q, k = (y.unflatten(-1, (self.num_heads, self.head_dim)) for y in (q, k))
        v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        h, after = self._delta_rule(q, k, v, beta, a, state, inputs, mode, cu_seqlens, slots, starts)
        gate = None if gate is None else gate.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        y = self.o_proj(self.o_norm(h, gate).flatten(-2))
        if one_token:
            y = y.squeeze(1)
        return y if after is None else (y, after)

    def _projections(
        self, x: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, v, and what becomes the write strength, the decay and the output gate."""
        names = ["q_proj", "k_proj", "v_proj", "b_proj"]
        names += ["a_proj"] * self.use_decay + ["g_proj"] * self.use_gate
        layers: list[Any] = [getattr(self, name) for name in names]
        if mode == "train" and self.fuse and unchanged(Linear, *layers):
            made = fused(x, *layers)
        else:
            made = tuple(layer(x) for layer in layers)
        found: dict[str, Any] = dict(zip(names, made, strict=True))
        return *made[:4], found.get("a_proj"), found.get("g_proj")  # type: ignore[return-value]

    def _convolved(
        self, q: Tensor, k: Tensor, v: Tensor, state: DeltaState | None, mode: Mode, cu_seqlens: Tensor | None,
        slots: Tensor | None, starts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """q, k, v behind their convolutions, and what those keep of their inputs; in decoding the state has it then."""
        tokens = (q, k, v)
        if not self.use_short_conv:
            empty: tuple[Tensor, ...] = () if state is None or mode == "train" else state[1:]
            if mode == "prefill" and state is None:
                count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
                empty = tuple(x.new_zeros(count, 0, x.shape[-1], dtype=self._wide()) for x in tokens)
            return F.silu(q), F.silu(k), F.silu(v), empty
        places: Places | None = None
        if cu_seqlens is not None:
            places = packed_places(cu_seqlens, q.shape[1])
        elif starts is not None:
            places = document_places(starts)
        convolutions: list[Any] = [self.q_conv1d, self.k_conv1d, self.v_conv1d]
        if mode == "decode":
            assert state is not None
            steps = zip(convolutions, tokens, state[1:], strict=True)
            return *(f.step(x, mine, slots) for f, x, mine in steps), ()  # type: ignore[return-value]
        pasts: tuple[Tensor | None, ...] = (None,) * 3 if state is None else state[1:]
        made = tuple(f(x, past, places) for f, x, past in zip(convolutions, tokens, pasts, strict=True))
        if mode == "train":
            return *made, ()  # type: ignore[return-value]
        inputs = [f.last(x, past, places) for f, x, past in zip(convolutions, tokens, pasts, strict=True)]
        return *made, tuple(x.to(self._wide()) for x in inputs)  # type: ignore[return-value]

    def _delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, a: Tensor | None, state: DeltaState | None,
        inputs: tuple[Tensor, ...], mode: Mode, cu_seqlens: Tensor | None, slots: Tensor | None, starts: Tensor | None,
    ) -> tuple[Tensor, DeltaState | None]:  # fmt: skip
        options: dict[str, Any] = {
            "write": "twice_sigmoid" if self.allow_neg_eigval else "sigmoid", "normalize_qk": True,
        }  # fmt: skip
        if starts is not None:
            # A reset is a decay of 0, which no pre-activation gives: the decay is made here.
            wide = torch.float64 if beta.dtype == torch.float64 else torch.float32
            decay = torch.zeros_like(beta, dtype=wide)
            if a is not None:
                decay = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
            a = decay.masked_fill(starts.unsqueeze(-1), float("-inf"))
        elif self.use_decay:
            options |= {"A_log": self.A_log, "dt_bias": self.dt_bias}
        if mode == "decode":
            assert state is not None
            return tfla.delta_rule_step(q, k, v, beta, a, state.C, slots=slots, **options), None
        options |= {"cu_seqlens": cu_seqlens, "chunk_size": self.chunk_size}
        options["initial_state"] = None if state is None else state.C
        if mode == "train":
            return tfla.delta_rule(q, k, v, beta, a, **options), None
        h, C = tfla.delta_rule(q, k, v, beta, a, output_final_state=True, **options)
        return h, DeltaState(C, *inputs)

    def prefill(
        self, x: Tensor, state: DeltaState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, DeltaState]:
        """y and the state after the last token of x, beginning from `state`."""
        return self(x, state, mode="prefill", cu_seqlens=cu_seqlens)

    def decode(self, x: Tensor, state: DeltaState, *, slots: Tensor | None = None) -> Tensor:
        """y for new tokens, (B,d_model) or (B,T,d_model); state, or its rows `slots`, change in place. No gradients."""
        return self(x, state, mode="decode", slots=slots)

    def new_state(self, sequences: int) -> DeltaState:
        """The state before the first token, where the layer's parameters are."""
        options: dict[str, Any] = {"device": self.o_norm.weight.device, "dtype": self._wide()}
        C = torch.zeros(sequences, self.num_v_heads, self.head_dim, self.head_v_dim, **options)
        before = self.q_conv1d.before if self.use_short_conv else 0
        dims = [self.num_heads * self.head_dim] * 2 + [self.num_v_heads * self.head_v_dim]
        return DeltaState(C, *(torch.zeros(sequences, before, dim, **options) for dim in dims))

    def _wide(self) -> torch.dtype:
        """Of states: that of the operator's. Inputs of 16 bits are kept in it exactly."""
        return torch.float64 if self.o_norm.weight.dtype == torch.float64 else torch.float32

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_v_heads={self.num_v_heads}, head_dim={self.head_dim}, "
            f"head_v_dim={self.head_v_dim}, allow_neg_eigval={self.allow_neg_eigval}"
        )
