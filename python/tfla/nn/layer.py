"""The mLSTM layer as the paper's models use it (appendix E.2)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tfla._options import DEFAULTS, Gate, Keep, Normalizer
from tfla.nn.cell import MLSTMCell, Mode, ScalarGate
from tfla.nn.linear import Linear, fused, unchanged
from tfla.ops import State


class MLSTMLayer(nn.Module):
    """x (B,T,dim) -> y (B,T,dim): q, k, v projections, gated cell, norm per head, output gate, output projection.

        layer = MLSTMLayer(dim=512, heads=4)
        y = layer(x)                        # training
        y, state = layer.prefill(prompt)    # a prompt of any length, and the state after it
        y = layer.decode(x, state)          # one token (B,dim) or a few (B,T,dim); state is updated in place

    The pre-norm and the skip connection around it belong to the block of the model.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        qk_factor: float = 0.5,
        v_factor: float = 1.0,
        gate: Gate = DEFAULTS.gate,
        normalizer: Normalizer | None = DEFAULTS.normalizer,
        norm: Literal["layer", "rms"] = "layer",
        eps: float = DEFAULTS.eps,
        norm_eps: float = 1e-6,
        soft_cap: float | None = 15.0,
        bias: bool = False,
        chunk_size: int | None = DEFAULTS.chunk_size,
        exact_normalizer_grad: bool = DEFAULTS.exact_normalizer_grad,
        keep: Keep = DEFAULTS.keep,
        input_gate_bias: float = -10.0,
        forget_gate_bias: tuple[float, float] = (3.0, 6.0),
        train_input_gate: bool = True,
        reset: float = float("-inf"),
        track_gates: bool = False,
        fuse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """qk_factor, v_factor: dimension of all query/key heads and of all value heads, as multiples of dim.

        input_gate_bias, forget_gate_bias, train_input_gate, reset, track_gates: of the cell. fuse: one product for all
        projections of x in training, not for the gates alone; their weights stay separate parameters.
        """
        super().__init__()
        qk_dim, v_dim = round(qk_factor * dim), round(v_factor * dim)
        for name, size in (("qk_factor", qk_dim), ("v_factor", v_dim)):
            if size <= 0 or size % heads != 0:
                raise ValueError(
                    f"tfla: {name} makes {size} of dim {dim}; it must be a positive multiple of heads, {heads}"
                )
        if norm not in ("layer", "rms"):
            raise ValueError(f"tfla: norm is {norm!r}; it must be 'layer' or 'rms'")
        self.heads, self.dqk, self.dhv = heads, qk_dim // heads, v_dim // heads
        self.norm, self.norm_eps = norm, norm_eps

        if fuse and bias:
            raise ValueError("tfla: fuse is given with bias; only projections without bias are fused")
        self.fuse = fuse

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q, self.k, self.v = linear(dim, qk_dim), linear(dim, qk_dim), linear(dim, v_dim)
        self.output_gate = linear(dim, v_dim)
        self.cell = MLSTMCell(
            dim, heads, gate=gate, normalizer=normalizer, eps=eps, soft_cap=soft_cap, chunk_size=chunk_size,
            exact_normalizer_grad=exact_normalizer_grad, keep=keep, input_gate_bias=input_gate_bias,
            forget_gate_bias=forget_gate_bias, train_input_gate=train_input_gate, reset=reset, track_gates=track_gates,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.norm_weight = nn.Parameter(torch.empty(v_dim, device=device, dtype=dtype))
        self.out = linear(v_dim, dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Of this module alone; its parts have their own, as for modules made on the device meta."""
        self.norm_weight.fill_(1.0)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        mode: Mode = "train",
        cu_seqlens: Tensor | None = None,
        slots: Tensor | None = None,
        starts: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """y; with mode "prefill" the pair (y, state). All modes come through here, so that hooks (FSDP) see them.

        cu_seqlens, slots, starts, group: as in `MLSTMCell.forward`.
        """
        one_token = mode == "decode" and x.dim() == 2
        if one_token:
            x = x.unsqueeze(1)
        q, k, v, o, products = self._projections(x, mode)
        q, k = (y.unflatten(-1, (self.heads, self.dqk)) for y in (q, k))
        v = v.unflatten(-1, (self.heads, self.dhv))
        h, after = self.cell(
            x, q, k, v, state, mode=mode, cu_seqlens=cu_seqlens, slots=slots, starts=starts, group=group,
            products=products,
        )  # fmt: skip
        y = self.out(torch.sigmoid(o) * self._normalized(h))
        if one_token:
            y = y.squeeze(1)
        return (y, after) if mode == "prefill" else y

    def _projections(
        self, x: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """q, k, v, the output gate, and the products of the other gates where they come with it.

        A column per head is too narrow for a product of its own: backward then reads x once more for each gate. Their
        weights are joined in every call, which costs more than it gains where x is short.
        """
        gates = (self.cell.input_gate, self.cell.forget_gate)
        if mode == "train" and unchanged(Linear, self.output_gate) and unchanged(ScalarGate, *gates):
            if self.fuse and unchanged(Linear, self.q, self.k, self.v):
                q, k, v, o, i, f = fused(x, self.q, self.k, self.v, self.output_gate, *gates)
                return q, k, v, o, (i, f)
            if self.output_gate.bias is None:
                o, i, f = fused(x, self.output_gate, *gates)
                return self.q(x), self.k(x), self.v(x), o, (i, f)
        return self.q(x), self.k(x), self.v(x), self.output_gate(x), None

    def prefill(
        self, x: Tensor, state: State | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """y and the state after the last token of x, beginning from `state`."""
        return self(x, state, mode="prefill", cu_seqlens=cu_seqlens)

    def decode(self, x: Tensor, state: State, *, slots: Tensor | None = None) -> Tensor:
        """y for new tokens, x (B,dim) or (B,T,dim); state, or its rows `slots`, is updated in place. No gradients."""
        return self(x, state, mode="decode", slots=slots)

    def new_state(self, sequences: int) -> State:
        """The state before the first token, where the layer's parameters are."""
        weight = self.norm_weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return State.zeros(sequences, self.heads, self.dqk, self.dhv, device=weight.device, dtype=dtype)

    def _normalized(self, h: Tensor) -> Tensor:
        function = F.layer_norm if self.norm == "layer" else F.rms_norm
        normalized = function(h, (self.dhv,), eps=self.norm_eps).flatten(-2)
        return normalized * self.norm_weight.to(normalized.dtype)
