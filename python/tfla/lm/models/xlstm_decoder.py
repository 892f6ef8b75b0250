"""The mLSTM layer in a decoder: one product for queries, keys, values and all gates."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla.lm.models.decoding import Weights, add_product, gated_norm, normalized_product
from tfla.lm.models.layers import RMSNorm
from tfla.nn import Linear, MLSTMLayer
from tfla.nn.cell import MLSTMCell, ScalarGate
from tfla.nn.linear import unchanged
from tfla.ops import mlstm, mlstm_step
from tfla.state import State


def joins(layer: MLSTMLayer) -> bool:
    """Whether the layer is as it was made, so that its weights are all there is to it."""
    projections = (layer.q, layer.k, layer.v, layer.output_gate, layer.out)
    return (
        unchanged(MLSTMLayer, layer)
        and unchanged(MLSTMCell, layer.cell)
        and unchanged(Linear, *projections)
        and unchanged(ScalarGate, layer.cell.input_gate, layer.cell.forget_gate)
        and all(projection.bias is None for projection in projections)
    )


class MLSTMDecoder:
    """x + layer(norm(x)) for an `MLSTMLayer`, of a prompt and of one more token."""

    def __init__(self, norm: RMSNorm, layer: MLSTMLayer, weights: Weights) -> None:
        cell = layer.cell
        gates = cell.input_gate, cell.forget_gate
        self.norm, self.eps = weights(norm.weight), norm.eps
        projections = (layer.q, layer.k, layer.v, layer.output_gate, *gates)
        self.joined = weights(*(projection.weight for projection in projections))
        self.bias = weights.wide(*(gate.bias for gate in gates))
        self.out, self.cell_norm = weights(layer.out.weight), weights(layer.norm_weight)
        self.centre, self.cell_norm_eps = layer.norm == "layer", layer.norm_eps
        self.heads, self.dqk, self.dhv = layer.heads, layer.dqk, layer.dhv
        self.sizes = [self.heads * size for size in (self.dqk, self.dqk, self.dhv, self.dhv, 2)]
        self.options: dict[str, Any] = {
            "gate": cell.gate, "normalizer": cell.normalizer, "eps": cell.eps, "soft_cap": cell.soft_cap,
        }  # fmt: skip
        self.chunk_size = cell.chunk_size

    def prefill(self, x: Tensor, state: State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        q, k, v, i, f, o = self._inputs(x)
        h, after = mlstm(
            q[None], k[None], v[None], i[None], f[None], initial_state=state, output_final_state=True,
            cu_seqlens=cu_seqlens, chunk_size=self.chunk_size, **self.options,
        )  # fmt: skip
        return self._outputs(x, h[0], o), after

    def decode(self, x: Tensor, state: State) -> Tensor:
        q, k, v, i, f, o = self._inputs(x)
        return self._outputs(x, mlstm_step(q, k, v, i, f, state, **self.options), o)

    def _inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k (rows,heads,dqk), v (rows,heads,dhv), i, f (rows,heads) and the output gate (rows,heads*dhv)."""
        q, k, v, o, gates = normalized_product(x, self.norm, self.eps, self.joined).split(self.sizes, dim=-1)
        # In float32, as the biases are the larger part: `ScalarGate`. The sum casts, without a pass of its own.
        i, f = (gates + self.bias).chunk(2, dim=-1)
        q, k = (y.unflatten(-1, (self.heads, self.dqk)) for y in (q, k))
        return q, k, v.unflatten(-1, (self.heads, self.dhv)), i, f, o

    def _outputs(self, x: Tensor, h: Tensor, o: Tensor) -> Tensor:
        y = gated_norm(h, o, self.cell_norm, self.cell_norm_eps, self.centre)
        return add_product(x, y, self.out)

    def new_state(self, sequences: int) -> State:
        dtype = self.bias.dtype
        return State.zeros(sequences, self.heads, self.dqk, self.dhv, device=self.bias.device, dtype=dtype)
