"""Text from a model: prompts through the chunkwise kernels, packed, then token by token on states in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfla.lm.fields import to_dict
from tfla.lm.model import LanguageModel
from tfla.nn import State


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"tfla: temperature is {self.temperature}; it must not be negative")
        if self.top_k is not None and self.top_k <= 0:
            raise ValueError(f"tfla: top_k is {self.top_k}; it must be positive, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"tfla: top_p is {self.top_p}; it must be above 0 and at most 1, or None for all tokens")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token (B) for each row of logits (B,vocab)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p is not None:
            ordered, index = logits.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, index, before >= self.top_p)
            logits = logits.masked_fill(dropped, float("-inf"))
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


class Session:
    """Sequences in progress: what the model remembers of each, and its logits for the next token.

    session = Session(model, [[256, 100, 101], [256, 97]])   # prompts of any lengths
    token = sampling.choose(session.logits)
    session.advance(token)
    session.save(path); session = Session.load(model, path)
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
        self._begin(model)
        empty = [row for row, prompt in enumerate(prompts) if not prompt]
        if not prompts or empty:
            where = f"prompt {empty[0]}" if empty else "the list of prompts"
            raise ValueError(f"tfla: {where} is empty; a text begins with the end-of-document token")
        self.states: list[State] = []
        self.logits = self._prefill(prompts, None)

    def _begin(self, model: LanguageModel) -> None:
        if model.config.kind != "xlstm":
            raise ValueError(f"tfla: kind is {model.config.kind!r}; only an xlstm generates")
        self.model = model
        self.device = next(model.parameters()).device
        self._graph: Any = None

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[Sequence[int]], states: list[State] | None) -> Tensor:
        lengths = torch.tensor([0, *map(len, prompts)], device=self.device)
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        logits, after = self.model.prefill(tokens[None], lengths.cumsum(0).int(), states)
        if states is None:
            self.states = after
        else:  # in place: a captured graph works on this memory
            for mine, new in zip(states, after, strict=True):
                mine.copy_(new)
        return logits

    def feed(self, prompts: Sequence[Sequence[int]]) -> None:
        """More text for every sequence, such as the next turn of a conversation."""
        if len(prompts) != self.logits.shape[0] or not all(prompts):
            raise ValueError(f"tfla: prompts has {len(prompts)} texts; it must have one, not empty, for each sequence")
        self.logits = self._prefill(prompts, self.states)

    @torch.inference_mode()
    def advance(self, tokens: Tensor) -> None:
        """One token (B) more of every sequence."""
        if self.device.type != "cuda":
            self.logits = self.model.decode(tokens, self.states)
            return
        if self._graph is None:
            self._capture(tokens)
        graph, given, logits = self._graph
        given.copy_(tokens)
        graph.replay()
        self.logits = logits.clone()

    def _capture(self, tokens: Tensor) -> None:
        """The step as a CUDA graph: at small batches the launches of all layers cost more than their work."""
        given = tokens.clone()
        before = [state.clone() for state in self.states]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once before the capture: libraries set themselves up
            self.model.decode(given, self.states)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.model.decode(given, self.states)
        for state, old in zip(self.states, before, strict=True):
            state.copy_(old)
        self._graph = (graph, given, logits)

    def save(self, path: Path) -> None:
        parts = [state.to("cpu")._asdict() for state in self.states]
        content = {"format": "tfla.lm session", "model": to_dict(self.model.config), "states": parts}
        torch.save({**content, "logits": self.logits.cpu()}, path)

    @classmethod
    def load(cls, model: LanguageModel, path: Path) -> Session:
        try:
            content = torch.load(path, weights_only=True)
        except FileNotFoundError:
            raise FileNotFoundError(f"tfla: {path} does not exist") from None
        except Exception:  # torch raises what its unpickler does
            raise ValueError(f"tfla: {path} is not a saved session, or it was cut off") from None
        if not isinstance(content, dict) or content.get("format") != "tfla.lm session":
            raise ValueError(f"tfla: {path} is not a saved session")
        if content["model"] != to_dict(model.config):
            ours, theirs = to_dict(model.config), content["model"]
            name = next(key for key in ours if ours[key] != theirs.get(key))
            raise ValueError(
                f"tfla: {path} is of a model with {name} {theirs.get(name)!r}; this one has {ours[name]!r}"
            )
        session = cls.__new__(cls)
        session._begin(model)
        session.states = [State(**part).to(session.device) for part in content["states"]]
        session.logits = content["logits"].to(session.device)
        return session


def generate(
    session: Session,
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    stop: Collection[int] = (),
    allowed: int | None = None,
    seed: int = 0,
) -> Iterator[list[int | None]]:
    """The next token of every sequence, step by step; None for those that have ended with a token of `stop`.

    allowed: tokens from this number on are never chosen (a vocabulary may be rounded up). Sequences that have ended are
    carried along until all have.
    """
    sampling = sampling or Sampling()
    generator = torch.Generator(session.device).manual_seed(seed)
    ended = [False] * session.logits.shape[0]
    for _ in range(max_tokens):
        logits = session.logits
        if allowed is not None and allowed < logits.shape[-1]:
            logits = logits.clone()
            logits[:, allowed:] = float("-inf")
        tokens = sampling.choose(logits, generator)
        session.advance(tokens)
        row: list[int | None] = []
        for place, token in enumerate(tokens.tolist()):
            ended[place] = ended[place] or token in stop
            row.append(None if ended[place] else token)
        if all(ended):
            return
        yield row


def complete(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    on_tokens: Callable[[list[int | None]], None] | None = None,
    **options: Any,
) -> list[list[int]]:
    """What follows each prompt, without the stop token; options as for `generate`."""
    results: list[list[int]] = [[] for _ in prompts]
    for row in generate(Session(model, prompts), max_tokens, sampling, **options):
        for result, token in zip(results, row, strict=True):
            if token is not None:
                result.append(token)
        if on_tokens is not None:
            on_tokens(row)
    return results
