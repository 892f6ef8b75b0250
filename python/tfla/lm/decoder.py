"""A model as it generates: weights once in the dtype of the computation, one product for projections of one input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.lm.model import LanguageModel, check_decodes, check_device
from tfla.lm.models.base import SequenceState
from tfla.lm.models.decoding import Weights, feed_forward, normalized_product
from tfla.lm.models.layers import Block, RMSNorm, soft_cap
from tfla.nn.linear import Linear, unchanged


class Decoder:
    """A `LanguageModel` for generation alone. The model stays as it is; what is trained later does not come through.

    decoder = Decoder(model, device="cuda")
    logits, states = decoder.prefill(tokens, cu_seqlens)    # tokens (total) of packed prompts
    logits = decoder.decode(tokens, states)                 # one more token (B) of each, states in place
    """

    def __init__(
        self, model: LanguageModel, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """dtype, device: the model's without them. Weights that need no change share the model's memory."""
        check_decodes(model.config)
        if any(hasattr(x, "full_tensor") for x in model.parameters()):
            raise ValueError("tfla: model has weights that are shards of several processes; load it whole to generate")
        _check_parts(model)
        self.config, self.dtype = model.config, dtype or model.dtype
        where = torch.device(device) if device is not None else model.embedding.weight.device
        check_device(self.config, where)
        weights = Weights(where, self.dtype)
        self.embedding, self.head = weights.cast(model.embedding.weight), weights(model.head.weight)
        self.norm, self.device = weights(model.norm.weight), self.embedding.device
        blocks: list[Any] = list(model.blocks)
        self.mixers = [model.kind.decoder(block.norm_mix, block.mix, weights) for block in blocks]
        self.ffns = [feed_forward(block.norm_ffn, block.ffn, weights) for block in blocks]

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, states: list[SequenceState] | None = None
    ) -> tuple[Tensor, list[SequenceState]]:
        """Logits (N,vocab) after the last token of each of N sequences, none of them empty, and the states there."""
        with self._computing():
            x, after = F.embedding(tokens, self.embedding), []
            for layer, (mixer, ffn) in enumerate(zip(self.mixers, self.ffns, strict=True)):
                x, state = mixer.prefill(x, None if states is None else states[layer], cu_seqlens)
                x = ffn.feed(x)
                after.append(state)
            return self._logits(x[cu_seqlens[1:].long() - 1]), after

    def decode(self, tokens: Tensor, states: list[SequenceState]) -> Tensor:
        """Logits (B,vocab) after one more token (B) of each sequence; states are updated in place."""
        with self._computing():
            x = F.embedding(tokens, self.embedding)
            for mixer, ffn, state in zip(self.mixers, self.ffns, states, strict=True):
                x = ffn.feed(mixer.decode(x, state))
            return self._logits(x)

    def _computing(self) -> Any:
        """Without autocast: weights have their dtype already, and a cast would read all of them once more."""
        return torch.autocast(self.device.type, enabled=False)

    def _logits(self, x: Tensor) -> Tensor:
        logits = normalized_product(x, self.norm, self.config.norm_eps, self.head)
        return soft_cap(logits if logits.dtype == torch.float64 else logits.float(), self.config.logit_soft_cap)

    def new_states(self, sequences: int) -> list[SequenceState]:
        return [mixer.new_state(sequences) for mixer in self.mixers]


def _check_parts(model: LanguageModel) -> None:
    """Mixers and feed-forward layers that were replaced are called. Of all else a decoder has the weights alone."""
    parts: dict[str, tuple[type[nn.Module], nn.Module]] = {
        "embedding": (nn.Embedding, model.embedding), "norm": (RMSNorm, model.norm), "head": (Linear, model.head),
    }  # fmt: skip
    blocks: list[Any] = list(model.blocks)
    for number, block in enumerate(blocks):
        norms = {"norm_mix": (RMSNorm, block.norm_mix), "norm_ffn": (RMSNorm, block.norm_ffn)}
        parts[f"blocks.{number}"] = Block, block
        parts |= {f"blocks.{number}.{name}": norm for name, norm in norms.items()}
    for name, (kind, part) in parts.items():
        if not unchanged(kind, part):
            raise ValueError(
                f"tfla: model.{name} was replaced, or has hooks, which a decoder would leave out; merge an adapter "
                "into its weights, or generate with model.prefill and model.decode"
            )
