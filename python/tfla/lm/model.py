"""The language model: embedding, blocks of sequence layer and feed-forward layer, norm, head (appendix E.2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tfla.lm.models.base import ModelConfig, SequenceState, find, kinds_that
from tfla.lm.models.init import initialize
from tfla.lm.models.layers import Block, Documents, RMSNorm, soft_cap
from tfla.lm.training.loss import cross_entropy, token_losses
from tfla.nn.cell import Mode
from tfla.nn.linear import Linear


class Losses(NamedTuple):
    total: Tensor  # sum over the tokens whose target counts
    tokens: Tensor | None = None  # (B,T) of each; only outside of training


def check_decodes(config: ModelConfig) -> None:
    if not find(config.kind).decodes:
        raise ValueError(f"tfla: kind is {config.kind!r}, which keeps no state; only {kinds_that('decodes')} generates")


def check_shares_sequences(config: ModelConfig) -> None:
    if not find(config.kind).shares_sequences:
        raise ValueError(
            f"tfla: context_parallel is given for kind {config.kind!r}; only {kinds_that('shares_sequences')} has it"
        )


def check_device(config: ModelConfig, device: torch.device) -> None:
    if device.type == "cuda" and not find(config.kind).runs_on_cuda:
        raise ValueError(f"tfla: device is {str(device)!r} for kind {config.kind!r}, which runs on 'cpu' alone")


class LanguageModel(nn.Module):
    """tokens (B,T) -> logits (B,T,vocab), or losses where targets are given.

    model = LanguageModel(preset("160m"))
    losses = model(tokens, targets)                       # training
    logits, states = model.prefill(prompts, cu_seqlens)   # last logits and states of packed prompts
    logits = model.decode(tokens, states)                 # the next token of each, states in place
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        """dtype: of the computation, beginning with the embedding's output; parameters are float32."""
        super().__init__()
        self.config, self.kind, self.dtype = config, find(config.kind), dtype
        self.checkpoint_activations = False
        self.compiled_loss = False
        self.group: dist.ProcessGroup | None = None  # context parallel: tokens are this rank's stretch of every row
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList([Block(config, self.kind.mixer(config)) for _ in range(config.layers)])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Linear(config.dim, config.vocab, bias=False)
        initialize(self)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Documents | None = None,
        states: list[SequenceState] | None = None,
        *,
        mode: Mode = "train",
        cu_seqlens: Tensor | None = None,
        slots: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Any:
        """All ways through the model, so that hooks (FSDP) see them; `prefill` and `decode` are short for some.

        documents: where documents begin in rows of training. rows: tokens of the flattened batch whose logits to make.
        Mode "train" gives Losses, or without targets logits; "prefill" (logits, states); "decode" logits.
        """
        shape = tokens.shape
        if mode == "train":
            x = self._train(tokens, documents)
            after = None
        else:
            x, after = self._infer(tokens, states, mode, cu_seqlens, slots)
        x = self.norm(x)
        if targets is not None:
            return self._losses(x, targets)
        if rows is not None:
            x = x.flatten(0, -2)[rows]
        elif mode == "train":
            x = x.view(*shape, -1)
        logits = soft_cap(
            self.head(x).float() if x.dtype != torch.float64 else self.head(x), self.config.logit_soft_cap
        )
        return (logits, after) if mode == "prefill" else logits

    def _losses(self, x: Tensor, targets: Tensor) -> Losses:
        flat, weight, cap = x.flatten(0, -2), self.head.weight, self.config.logit_soft_cap
        if torch.is_grad_enabled():
            return Losses(cross_entropy(flat, weight, targets.flatten(), cap, compiled=self.compiled_loss))
        losses = token_losses(flat, weight, targets.flatten(), cap)
        return Losses(losses.sum(), losses.view(targets.shape))

    def _train(self, tokens: Tensor, documents: Documents | None) -> Tensor:
        if self.group is not None:
            check_shares_sequences(self.config)
        tokens, options = self.kind.arrange(self.config, tokens, documents, self.dtype, self.group)
        x = self.embedding(tokens).to(self.dtype)
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, **options)
            else:
                x = block(x, **options)
        return x

    def _infer(
        self,
        tokens: Tensor,
        states: list[SequenceState] | None,
        mode: Mode,
        cu_seqlens: Tensor | None,
        slots: Tensor | None,
    ) -> tuple[Tensor, list[SequenceState]]:
        check_decodes(self.config)
        x = self.embedding(tokens).to(self.dtype)
        after: list[SequenceState] = []
        for layer, block in enumerate(self.blocks):
            state: Any = None if states is None else states[layer]
            if mode == "prefill":
                x, state = block(x, state, mode=mode, cu_seqlens=cu_seqlens)
                after.append(state)
            else:
                x = block(x, state, mode=mode, slots=slots)
        return x, after

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor | None = None, states: list[SequenceState] | None = None
    ) -> tuple[Tensor, list[SequenceState]]:
        """Logits (N,vocab) after the last token of each sequence, and the states there.

        tokens (B,T), or (1,total) with the boundaries of N sequences of any length (none of them empty) in cu_seqlens.
        """
        if cu_seqlens is None:
            rows = torch.arange(1, tokens.shape[0] + 1, device=tokens.device) * tokens.shape[1] - 1
        else:
            rows = cu_seqlens[1:].long() - 1
        return self(tokens, states=states, mode="prefill", cu_seqlens=cu_seqlens, rows=rows)

    def decode(self, tokens: Tensor, states: list[SequenceState], slots: Tensor | None = None) -> Tensor:
        """Logits (B,vocab) after one more token (B) of each sequence; states are updated in place."""
        return self(tokens, states=states, mode="decode", slots=slots)

    @torch.no_grad()
    def matrices_in_dtype(self) -> LanguageModel:
        """For use without training: matrices are kept in the dtype they are cast to at every call anyway. In place."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.to(self.dtype)
        return self

    def new_states(self, sequences: int) -> list[SequenceState]:
        layers: list[Any] = [block.mix for block in self.blocks]
        return [layer.new_state(sequences) for layer in layers]

    def input_gate_max(self) -> Tensor | None:
        """The largest input gate pre-activation of the last training step, over all layers."""
        blocks: list[Any] = list(self.blocks)
        largest = [self.kind.input_gate_max(block.mix) for block in blocks]
        known = [value for value in largest if value is not None]
        return torch.stack(known).max() if known else None
