"""Weights of the xLSTM in the layouts of the package xlstm and of Hugging Face transformers."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tfla.lm.models.base import Exchange, feed_forward_dim

if TYPE_CHECKING:
    from tfla.lm.models.xlstm import XLSTMConfig

EMBEDDING = {"xlstm": "embedding.weight", "huggingface": "backbone.embeddings.weight"}
# Ours to theirs, inside a block.
BLOCK = {
    "norm_mix.weight": "norm_mlstm.weight",
    "norm_ffn.weight": "norm_ffn.weight",
    "mix.q.weight": "mlstm_layer.q.weight",
    "mix.k.weight": "mlstm_layer.k.weight",
    "mix.v.weight": "mlstm_layer.v.weight",
    "mix.output_gate.weight": "mlstm_layer.ogate_preact.weight",
    "mix.cell.input_gate.weight": "mlstm_layer.igate_preact.weight",
    "mix.cell.input_gate.bias": "mlstm_layer.igate_preact.bias",
    "mix.cell.forget_gate.weight": "mlstm_layer.fgate_preact.weight",
    "mix.cell.forget_gate.bias": "mlstm_layer.fgate_preact.bias",
    "mix.norm_weight": "mlstm_layer.multihead_norm.weight",
    "mix.out.weight": "mlstm_layer.out_proj.weight",
    "ffn.gate.weight": "ffn.proj_up_gate.weight",
    "ffn.up.weight": "ffn.proj_up.weight",
    "ffn.down.weight": "ffn.proj_down.weight",
}
KERNELS = {
    "xlstm": ("chunkwise--triton_limit_chunk", "native_sequence__triton", "triton"),
    "huggingface": ("chunkwise--native_autograd", "native_sequence__native", "native"),
}
SIGMOID_KERNEL = "chunkwise--triton_xl_chunk_siging"


class XLSTMExchange(Exchange["XLSTMConfig"]):
    layouts = {"xlstm": "config.yaml", "huggingface": "config.json"}

    def fields(self, config: XLSTMConfig, layout: str, eod: int | None) -> dict[str, Any]:
        refused = {
            "cell_norm": config.cell_norm != "layer",
            "cell_norm_eps": config.cell_norm_eps != config.norm_eps,
            "gate_soft_cap": config.gate_soft_cap is None,
            "logit_soft_cap": config.logit_soft_cap is None,
            "normalizer": (config.normalizer or ("max" if config.gate == "exp" else "none")) != "max",
        }
        for name, bad in refused.items():
            if bad:
                value = getattr(config, name)
                raise ValueError(
                    f"tfla: {name} is {value!r}, which the layout {layout!r} cannot say; only its own can be exported"
                )
        factor, multiple = 2.6667, 64
        if config.feed_forward != feed_forward_dim(config.dim):
            factor, multiple = (config.feed_forward + 0.5) / config.dim, 1
        chunkwise, sequence, step = KERNELS[layout]
        theirs: dict[str, Any] = {
            "embedding_dim": config.dim, "num_heads": config.heads, "num_blocks": config.layers,
            "vocab_size": config.vocab, "use_bias": False, "norm_eps": config.norm_eps,
            "norm_reduction_force_float32": True, "add_out_norm": True, "qk_dim_factor": config.qk_factor,
            "v_dim_factor": config.v_factor,
            "chunkwise_kernel": SIGMOID_KERNEL if config.gate == "sigmoid" else chunkwise, "sequence_kernel": sequence,
            "step_kernel": step, "mode": "inference", "chunk_size": 64, "return_last_states": True,
            "autocast_kernel_dtype": "bfloat16", "eps": config.eps, "inference_state_dtype": "float32",
            "ffn_proj_factor": factor, "ffn_round_up_to_multiple_of": multiple, "gate_soft_cap": config.gate_soft_cap,
            "output_logit_soft_cap": config.logit_soft_cap, "weight_mode": "single",
        }  # fmt: skip
        if layout == "huggingface":
            # Both names of each pair: one alone leaves the other at its default there.
            theirs |= {"hidden_size": config.dim, "num_hidden_layers": config.layers, "model_type": "xlstm"}
            theirs |= {
                "architectures": ["xLSTMForCausalLM"],
                "tie_word_embeddings": False,
                "max_inference_chunksize": 16384,
            }
            if eod is not None:
                theirs |= {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod}
        return theirs

    def keys(self, config: XLSTMConfig, layout: str) -> dict[str, str]:
        keys = {"embedding.weight": EMBEDDING[layout], "norm.weight": "backbone.out_norm.weight"}
        keys["head.weight"] = "lm_head.weight"
        for layer in range(config.layers):
            keys |= {f"blocks.{layer}.{ours}": f"backbone.blocks.{layer}.{theirs}" for ours, theirs in BLOCK.items()}
        return keys

    def recognise(self, weights: Mapping[str, Tensor]) -> str | None:
        if not any(".mlstm_layer." in key for key in weights):
            return None
        return "huggingface" if EMBEDDING["huggingface"] in weights else "xlstm"

    def read(
        self, weights: dict[str, Tensor], layout: str, given: dict[str, Any], path: Path, file: Path
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        weights = _separate(weights, path)
        return _config(weights, layout, path, given, file), weights


def _separate(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Fused weights (weight_mode "fused") as separate ones."""
    result = dict(weights)
    for key in weights:
        prefix, _, name = key.rpartition(".")
        stem, _, last = prefix.rpartition(".")
        if last == "qkv_opreact":
            norm = weights.get(f"{stem}.multihead_norm.weight")
            whole = result.pop(key)
            value_dim = 0 if norm is None else norm.numel()
            qk_dim = (len(whole) - 2 * value_dim) // 2 if whole.dim() else 0
            if qk_dim <= 0 or not value_dim or 2 * (qk_dim + value_dim) != len(whole):
                raise ValueError(
                    f"tfla: {key} of {path} has shape {tuple(whole.shape)}, "
                    f"which is not queries, keys, values and gates for {value_dim} values"
                )
            parts = whole.split([qk_dim, qk_dim, value_dim, value_dim])
            result |= {
                f"{stem}.{part}.{name}": x for part, x in zip(("q", "k", "v", "ogate_preact"), parts, strict=True)
            }
        elif last == "ifgate_preact":
            parts = result.pop(key).chunk(2)
            result |= {
                f"{stem}.{part}.{name}": x for part, x in zip(("igate_preact", "fgate_preact"), parts, strict=True)
            }
        elif last == "proj_up_gate_z":
            parts = result.pop(key).chunk(2)
            result |= {f"{stem}.{part}.{name}": x for part, x in zip(("proj_up_gate", "proj_up"), parts, strict=True)}
    return result


def _number(given: dict[str, Any], file: Path, name: str, default: float) -> float:
    """YAML reads some numbers as texts."""
    value = given.get(name, default)
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not 0 < result < math.inf:
        raise ValueError(f"tfla: {file}: {name} is {reprlib.repr(value)}; it must be a positive number")
    return result


def _config(weights: dict[str, Tensor], layout: str, path: Path, given: dict[str, Any], file: Path) -> dict[str, Any]:
    """Sizes come from the weights, the rest from the config."""
    axes = {
        EMBEDDING[layout]: 2, "backbone.blocks.0.ffn.proj_up.weight": 2,
        "backbone.blocks.0.mlstm_layer.igate_preact.bias": 1, "backbone.blocks.0.mlstm_layer.q.weight": 2,
        "backbone.blocks.0.mlstm_layer.v.weight": 2,
    }  # fmt: skip
    for key, count in axes.items():
        if key not in weights:
            raise ValueError(f"tfla: {path} has no weight {key}; it is not an xLSTM of a published layout")
        shape = tuple(weights[key].shape)
        if len(shape) != count or 0 in shape:
            raise ValueError(f"tfla: {key} of {path} has shape {shape}; it must have {count} axes, none of them empty")
    (vocab, dim), (hidden, _), (heads,), (qk, _), (v, _) = (weights[key].shape for key in axes)
    blocks = {int(match[1]) for key in weights if (match := re.match(r"backbone\.blocks\.(\d{1,9})\.", key))}
    kernel = str(given.get("chunkwise_kernel", ""))
    gate = "sigmoid" if "siging" in kernel else "exp"
    norm_eps = _number(given, file, "norm_eps", 1e-6)
    return {
        "layers": len(blocks), "dim": dim, "heads": heads, "vocab": vocab, "ffn_dim": hidden, "qk_factor": qk / dim,
        "v_factor": v / dim, "gate": gate, "normalizer": "max" if gate == "sigmoid" else None,
        "eps": _number(given, file, "eps", 1e-6), "norm_eps": norm_eps, "cell_norm_eps": norm_eps,
        "gate_soft_cap": _number(given, file, "gate_soft_cap", 15.0),
        "logit_soft_cap": _number(given, file, "output_logit_soft_cap", 30.0),
    }  # fmt: skip
