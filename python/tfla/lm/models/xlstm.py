"""The xLSTM of the paper (section 5.1, appendix E.2): blocks of mLSTM layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tfla import info
from tfla._options import Normalizer
from tfla.lm.fields import Count, NotNegative, Positive, Range, option
from tfla.lm.models.base import Kind, ModelConfig, Rows, kind_named
from tfla.lm.models.decoding import Weights
from tfla.lm.models.init import normal
from tfla.lm.models.layers import Documents, RMSNorm
from tfla.lm.models.xlstm_decoder import MLSTMDecoder, joins
from tfla.lm.models.xlstm_exchange import XLSTMExchange
from tfla.nn import MLSTMLayer

InputGate = Literal["exp", "sigmoid"]
Reset = Literal["exact", "soft"]
Norm = Literal["layer", "rms"]
Factor = Annotated[float, Range(above=0, at_most=64)]
SOFT_RESET = -25.0  # the paper's forget gate at the first token of a document


@dataclass(frozen=True)
class XLSTMConfig(ModelConfig):
    kind: str = kind_named("xlstm")
    qk_factor: Factor = option("all query/key heads together, as a multiple of dim", 0.5)
    v_factor: Factor = option("all value heads together, as a multiple of dim", 1.0)
    gate: InputGate = option("input gate: mLSTMexp or mLSTMsig", "exp")
    normalizer: Normalizer | None = option("denominator; without it the paper's for the gate", None)
    eps: NotNegative = option("in the denominator", 1e-6)
    cell_norm: Norm = option("norm per head after the cell", "layer")
    cell_norm_eps: NotNegative = option("of that norm", 1e-6)
    gate_soft_cap: Positive | None = option("of gate pre-activations; none: no cap", 15.0)
    input_gate_bias: float = option("at the beginning", -10.0)
    forget_gate_bias: tuple[float, float] = option("at the beginning, of the first and the last head", (3.0, 6.0))
    train_input_gate: bool = option("or leave the input gate at its bias", True)
    zero_output_gate: bool = option("output gate weights begin at zero, as in the paper's code", True)
    reset: Reset = option("where a document begins: exact, or a forget gate of -25", "exact")
    chunk_size: Count | None = option("of the kernels; none: the plan's choice", None)


class XLSTM(Kind[XLSTMConfig]):
    config = XLSTMConfig
    variants = {"exp": {"gate": "exp"}, "sigmoid": {"gate": "sigmoid"}}
    decodes = shares_sequences = True
    exchange = XLSTMExchange()

    def mixer(self, config: XLSTMConfig) -> MLSTMLayer:
        return MLSTMLayer(
            config.dim, config.heads, qk_factor=config.qk_factor, v_factor=config.v_factor, gate=config.gate,
            normalizer=config.normalizer, norm=config.cell_norm, eps=config.eps, norm_eps=config.cell_norm_eps,
            soft_cap=config.gate_soft_cap, chunk_size=config.chunk_size, input_gate_bias=config.input_gate_bias,
            forget_gate_bias=config.forget_gate_bias, train_input_gate=config.train_input_gate,
            reset=float("-inf") if config.reset == "exact" else SOFT_RESET, track_gates=True, fuse=config.fuse,
        )  # fmt: skip

    def reads(self, mixer: MLSTMLayer) -> tuple[nn.Module, ...]:
        return mixer.q, mixer.k, mixer.v

    def writes(self, mixer: MLSTMLayer) -> tuple[nn.Module, ...]:
        return (mixer.out,)

    def initialize(self, mixer: MLSTMLayer, config: XLSTMConfig, std: float) -> None:
        """Gates and norm have set themselves: weights 0 and the config's biases; ones."""
        if config.zero_output_gate:
            nn.init.zeros_(mixer.output_gate.weight)
        else:
            normal(mixer.output_gate, std=std)

    def arrange(
        self, config: XLSTMConfig, tokens: Tensor, documents: Documents | None, dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        """Rows end to end as packed sequences where that is exact, else with the first tokens of documents."""
        options: dict[str, Any] = {} if group is None else {"group": group}
        if documents is None:
            return tokens, options
        if documents.cu_seqlens is not None and config.reset == "exact" and group is None:
            return tokens.reshape(1, -1), {"cu_seqlens": documents.cu_seqlens}
        return tokens, {**options, "starts": documents.starts}

    def state_bytes(self, config: XLSTMConfig, rows: Rows, dtype: torch.dtype, gpu: str | None = None) -> int:
        packed = rows.sequences is not None and config.reset == "exact"
        word: Any = str(dtype).removeprefix("torch.")
        call: dict[str, Any] = {
            "batch": 1 if packed else rows.batch, "tokens": rows.batch * rows.tokens if packed else rows.tokens,
            "heads": config.heads, "dqk": round(config.qk_factor * config.dim) // config.heads,
            "dhv": round(config.v_factor * config.dim) // config.heads, "dtype": word,
            "sequences": rows.sequences if packed else None, "chunk_size": config.chunk_size, "gpu": gpu,
        }  # fmt: skip
        return info.saved(**call, keep="states").bytes - info.saved(**call, keep="denominators").bytes

    def keep_states(self, mixer: MLSTMLayer) -> None:
        mixer.cell.keep = "states"

    def decoder(self, norm: RMSNorm, mixer: MLSTMLayer, weights: Weights) -> Any:
        return MLSTMDecoder(norm, mixer, weights) if joins(mixer) else super().decoder(norm, mixer, weights)

    def work(self, config: XLSTMConfig, context: int) -> tuple[float, float]:
        """k v^T and C^T q of the recurrence, whatever more a chunkwise kernel does."""
        qk, v = config.qk_factor * config.dim, config.v_factor * config.dim
        return config.dim * (2 * qk + 3 * v + 2 * config.heads), 4 * qk * v / config.heads

    def input_gate_max(self, mixer: MLSTMLayer) -> Tensor:
        return mixer.cell.input_gate_max
