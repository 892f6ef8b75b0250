"""Text from a model: prompts through the chunkwise kernels, packed, then token by token on states in place.

`Decoder` has the weights and computes; a `Session` has the states of some sequences; `generate` chooses tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from tfla.lm.checks import is_whole, naming
from tfla.lm.decoder import Decoder
from tfla.lm.fields import Count, NotNegative, Range, check_fields, option, to_dict
from tfla.lm.model import LanguageModel
from tfla.lm.models.base import ModelConfig, SequenceState

FORMAT = "tfla.lm session"
_NAN = -1  # in place of a token that was chosen by no number
_NOT_NUMBERS = "tfla: logits of the model are not numbers (NaN); its weights or its state are damaged"


@dataclass(frozen=True)
class Sampling:
    temperature: NotNegative = option("0 takes the likeliest token", 1.0)
    top_k: Count | None = option("choose among so many likeliest tokens; none: among all", None)
    top_p: Annotated[float, Range(above=0, at_most=1)] | None = option(
        "choose among the likeliest tokens that reach this probability together; none: among all", None
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token (B) for each row of logits (B,vocab)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        # The largest is 0, so that the smallest temperature makes no infinite or undefined number of it.
        range_ = torch.finfo(logits.dtype)
        temperature = min(max(self.temperature, range_.tiny), range_.max)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p is not None:
            ordered, index = logits.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, index, before >= self.top_p)
            logits = logits.masked_fill(dropped, float("-inf"))
        # As torch.multinomial draws, without its checks, for which the host waits until the GPU is done.
        odds = logits.softmax(-1)
        return odds.div_(torch.empty_like(odds).exponential_(generator=generator)).argmax(-1)


class Session:
    """Sequences in progress: what the model remembers of each, and its logits for the next token.

    session = Session(Decoder(model), [[256, 100, 101], [256, 97]])   # prompts of any lengths
    token = sampling.choose(session.logits)
    session.advance(token)
    session.save(path); session = Session.load(model, path)
    """

    def __init__(self, model: Decoder | LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
        """model: its decoder, for many sessions; of a model one is made, a copy of most weights, for this alone."""
        self._begin(model)
        empty = [row for row, prompt in enumerate(prompts) if not prompt]
        if not prompts or empty:
            where = f"prompt {empty[0]}" if empty else "the list of prompts"
            raise ValueError(f"tfla: {where} is empty; a text begins with the end-of-document token")
        self.states: list[SequenceState] = []
        self.logits = self._prefill(prompts, None)

    def _begin(self, model: Decoder | LanguageModel) -> None:
        self.decoder = model if isinstance(model, Decoder) else Decoder(model)
        self.device = self.decoder.device
        self._graph: Any = None

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[Sequence[int]], states: list[SequenceState] | None) -> Tensor:
        _check_tokens("prompts", [token for prompt in prompts for token in prompt], self.decoder.config.vocab)
        lengths = torch.tensor([0, *map(len, prompts)], device=self.device)
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        logits, after = self.decoder.prefill(tokens, lengths.cumsum(0).int(), states)
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
            self.logits = self.decoder.decode(tokens, self.states)
            return
        if self._graph is None:
            with torch.cuda.device(self.device):
                self._capture(tokens)
        graph, given, logits = self._graph
        given.copy_(tokens)
        graph.replay()
        self.logits = logits.clone()

    def _capture(self, tokens: Tensor) -> None:
        """The step as a CUDA graph: at small batches the launches of all layers cost more than their work."""
        given = tokens.clone()
        # All layers once on one state, before the capture: libraries set themselves up. A capture itself runs nothing.
        scratch = self.states[0].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.decoder.decode(given, [scratch] * len(self.states))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.decoder.decode(given, self.states)
        self._graph = (graph, given, logits)

    def save(self, path: Path) -> None:
        """A session that is saved there already is kept until this one is whole."""
        parts = [state.to("cpu")._asdict() for state in self.states]
        content = {
            "format": FORMAT,
            "model": to_dict(self.decoder.config),
            "states": parts,
            "logits": self.logits.cpu(),
        }
        path = Path(path)
        beside = path.is_file() or not path.exists()  # and not a device, which is nothing to be replaced
        target = path.with_name(f".{path.name}.partial") if beside else path
        try:
            with naming(path), target.open("wb") as file:
                torch.save(content, file)
            target.replace(path)
        except BaseException:
            if beside:
                target.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, model: Decoder | LanguageModel, path: Path) -> Session:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise FileNotFoundError(f"tfla: {path} does not exist") from None
        except OSError:
            raise
        except Exception:  # torch raises what its unpickler does
            raise ValueError(f"tfla: {path} is not a saved session, or it was cut off") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"tfla: {path} is not a saved session")
        ours, theirs = to_dict(model.config), content.get("model")
        if not isinstance(theirs, dict):
            raise ValueError(f"tfla: {path} does not say its model; it is not a saved session")
        _, theirs = ModelConfig.choose(theirs)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                was, now = theirs.get(name), ours.get(name)
                raise ValueError(f"tfla: {path} is of a model with {name} {was!r}; this one has {now!r}")
        session = cls.__new__(cls)
        session._begin(model)
        session.logits, session.states = _saved_tensors(content, session.decoder, path)
        return session


def _saved_tensors(content: dict[str, Any], model: Decoder, path: Path) -> tuple[Tensor, list[SequenceState]]:
    """Logits and states of a saved session on the model's device, as they would be if the model had made them."""
    logits, parts = content.get("logits"), content.get("states")
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] != model.config.vocab:
        raise ValueError(f"tfla: logits of {path} are not (sequences, {model.config.vocab}); it is damaged")
    expected = model.new_states(logits.shape[0])
    if not isinstance(parts, list) or len(parts) != len(expected):
        raise ValueError(f"tfla: {path} has not {len(expected)} states, one for each layer; it is damaged")
    for layer, (part, like) in enumerate(zip(parts, expected, strict=True)):
        shapes = {name: getattr(x, "shape", None) for name, x in part.items()} if isinstance(part, dict) else None
        if shapes != {name: x.shape for name, x in like._asdict().items()}:
            raise ValueError(f"tfla: the state of layer {layer} in {path} is not one of this model; it is damaged")
        like.copy_(type(like)(**part))
    return logits.to(model.device), expected


def _check_tokens(name: str, tokens: Collection[int], vocab: int) -> None:
    """Before they are an index out of bounds, on a GPU the end of the process."""
    for token in tokens:
        if not 0 <= token < vocab:
            raise ValueError(f"tfla: {name} has a token {token!r}; tokens of the model are from 0 to {vocab - 1}")


class _Host:
    """Tokens on their way to the host. They are chosen before a step begins and arrive while it runs: the GPU has work
    while the host looks at them, and yet no step is begun for a token that nobody has asked for."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def send(self, tokens: Tensor) -> None:
        self.tokens = tokens
        if self.cuda:
            self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.tokens.copy_(tokens, non_blocking=True)
            self.arrived = torch.cuda.current_stream(tokens.device).record_event()

    def receive(self) -> list[int]:
        if self.cuda:
            self.arrived.synchronize()
        return self.tokens.tolist()


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
    if not is_whole(max_tokens) or max_tokens < 0:
        raise ValueError(f"tfla: max_tokens is {max_tokens!r}; it must be a whole number that is not negative")
    if not is_whole(seed) or not 0 <= seed < 2**64:
        raise ValueError(f"tfla: seed is {seed!r}; it must be a whole number from 0 to 2^64 - 1")
    if allowed is not None and allowed <= 0:
        raise ValueError(f"tfla: allowed is {allowed}; it must be positive, or None for all tokens")
    _check_tokens("stop", stop, session.decoder.config.vocab)
    if session.logits.isnan().any():
        raise ValueError(_NOT_NUMBERS)
    generator = torch.Generator(session.device).manual_seed(seed)
    return _tokens(session, max_tokens, sampling or Sampling(), frozenset(stop), allowed, generator)


def _or_nan(tokens: Tensor, logits: Tensor) -> Tensor:
    """What the host sees: the first step after which logits are NaN ends the text, and the host waits for no check."""
    return torch.where(logits.gather(1, tokens[:, None])[:, 0].isnan(), _NAN, tokens)


def _tokens(
    session: Session, max_tokens: int, sampling: Sampling, stop: Collection[int], allowed: int | None,
    generator: torch.Generator,
) -> Iterator[list[int | None]]:  # fmt: skip
    ended, host = [False] * session.logits.shape[0], _Host(session.device)
    for _ in range(max_tokens):
        tokens = sampling.choose(session.logits[:, :allowed], generator)
        host.send(_or_nan(tokens, session.logits))
        session.advance(tokens)
        row: list[int | None] = []
        for place, token in enumerate(host.receive()):
            if token == _NAN:
                raise ValueError(_NOT_NUMBERS)
            ended[place] = ended[place] or token in stop
            row.append(None if ended[place] else token)
        if all(ended):
            return
        yield row


def complete(
    model: Decoder | LanguageModel,
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
