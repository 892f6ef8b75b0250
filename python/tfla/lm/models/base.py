"""What a kind of model is, and the fields that all kinds have.

A kind is one file beside this one and one row in `tfla.lm.models`: the class of its configuration, its sequence layer
(mixer), how that begins, what it costs, whether it generates and shares sequences, and whose weights it can exchange.
All else asks `find(config.kind)`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tfla._options import unknown
from tfla.lm.fields import NotNegative, Positive, Range, check_fields, option
from tfla.lm.models.decoding import Layer, Weights
from tfla.lm.models.layers import Documents, RMSNorm

Width = Annotated[int, Range(at_least=1, at_most=2**20)]  # more is a slip of the hand, not a model
FIRST = "xlstm"  # the kind of a configuration that does not say its own

KINDS: dict[str, Kind[Any]] = {}


def find(kind: object) -> Kind[Any]:
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("kind", kind, tuple(KINDS))
    return KINDS[kind]


def kinds_that(ability: str) -> str:
    """The names of kinds with an ability, for a sentence."""
    return " or ".join(name for name, kind in KINDS.items() if getattr(kind, ability)) or "no kind"


def feed_forward_dim(dim: int) -> int:
    """8/3 of dim, to a multiple of 64 as the published PyTorch models round it (2048 for dim 768, not 2112)."""
    return int((dim * 2.6667 + 63) // 64 * 64)


def kind_named(name: str) -> Any:
    """The field `kind`, which every configuration has with a default of its own."""
    return option("which model", name, choices=lambda: tuple(KINDS))


class _ByKind(type):
    """ModelConfig(kind="transformer", ...) is a TransformerConfig; so is dataclasses.replace(..., kind=...)."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        by_place = dict(zip(names, args, strict=False))
        if len(args) > len(names) or by_place.keys() & values.keys():
            raise TypeError(f"tfla: {cls.__name__} is given a field twice, or more than the {len(names)} that it has")
        chosen, values = cls.choose({**by_place, **values})  # type: ignore[attr-defined]
        return type.__call__(chosen, **values)


@dataclass(frozen=True)
class ModelConfig(metaclass=_ByKind):
    """A model of some kind: ModelConfig(layers=4, dim=128, heads=2, kind=...), with the fields of that kind."""

    layers: Width = option("blocks")
    dim: Width = option("width of the residual stream")
    heads: Width = option("heads of the sequence layer")
    vocab: Annotated[int, Range(at_least=1, at_most=2**31)] = option("tokens; the data decide", 50304)
    kind: str = kind_named(FIRST)
    ffn_dim: Width | None = option("width of the feed-forward layer; none: 8/3 of dim", None)
    norm_eps: NotNegative = option("of the norms before layers and head", 1e-6)
    logit_soft_cap: Positive | None = option("of logits; none: no cap", 30.0)
    fuse: bool = option("one product for projections of the same input", False)

    if TYPE_CHECKING:  # fields of the kind, besides those of every model

        def __init__(self, layers: int, dim: int, heads: int, *fields: Any, **named: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def feed_forward(self) -> int:
        return self.ffn_dim if self.ffn_dim is not None else feed_forward_dim(self.dim)

    @classmethod
    def choose(cls, values: dict[str, Any]) -> tuple[type[ModelConfig], dict[str, Any]]:
        """The class of values, and those of them that it has or nobody has.

        What only other kinds have is left out: options may be tried with several kinds, and files of version 0.1 hold
        the fields of all.
        """
        chosen = find(values.get("kind", cls.kind)).config
        others = all_fields().keys() - {field.name for field in dataclasses.fields(chosen)}
        return chosen, {name: value for name, value in values.items() if name not in others}


def all_fields() -> dict[str, tuple[type[ModelConfig], dataclasses.Field]]:
    """The fields of all kinds by name, each with a class that has it."""
    classes: list[type[ModelConfig]] = [ModelConfig, *(kind.config for kind in KINDS.values())]
    found: dict[str, tuple[type[ModelConfig], dataclasses.Field]] = {}
    for cls in classes:
        for field in dataclasses.fields(cls):
            found.setdefault(field.name, (cls, field))
    return found


C = TypeVar("C", bound=ModelConfig)


class SequenceState(Protocol):
    """What a mixer keeps of sequences between tokens: a named tuple of tensors. `tfla.State` is one."""

    def clone(self) -> Any: ...
    def copy_(self, other: Any) -> Any: ...
    def to(self, device: str) -> Any: ...
    def _asdict(self) -> dict[str, Tensor]: ...


class Exchange(ABC, Generic[C]):
    """Weights of a kind in the layouts of published packages."""

    layouts: Mapping[str, str]  # the name of each layout's file of fields

    @abstractmethod
    def fields(self, config: C, layout: str, eod: int | None) -> dict[str, Any]:
        """Their fields of our model, or a refusal that names what they cannot say."""

    @abstractmethod
    def keys(self, config: C, layout: str) -> dict[str, str]:
        """Their key of each of our weights."""

    @abstractmethod
    def recognise(self, weights: Mapping[str, Tensor]) -> str | None:
        """The layout that weights have, None where they are not of this kind."""

    @abstractmethod
    def read(
        self, weights: dict[str, Tensor], layout: str, given: dict[str, Any], path: Path, file: Path
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Our fields of their weights and fields (path, file: where they are from), and the weights under `keys`."""


class Rows(NamedTuple):
    """What a mixer is given at a time."""

    batch: int
    tokens: int  # of each
    sequences: int | None = None  # where `arrange` may lay rows end to end: how many sequences they then are


class Kind(ABC, Generic[C]):
    config: type[C]
    sizes: Mapping[str, Mapping[str, Any]] = {}  # fields of a preset, where they are not the xLSTM's
    variants: Mapping[str, Mapping[str, Any]] = {}  # fields of what `bench` times, by name
    decodes = False  # whether its mixer has states: modes "prefill" and "decode", and new_state(sequences)
    shares_sequences = False  # whether its mixer takes `group`, for context parallel
    runs_on_cuda = True  # whether its mixer has kernels there
    exchange: Exchange[C] | None = None

    @abstractmethod
    def mixer(self, config: C) -> nn.Module:
        """The sequence layer of a block: (B,T,dim) to the same; what `arrange` returns comes as named arguments."""

    @abstractmethod
    def reads(self, mixer: Any) -> tuple[nn.Module, ...]:
        """Layers of a mixer that read the residual stream; their weights begin small."""

    @abstractmethod
    def writes(self, mixer: Any) -> tuple[nn.Module, ...]:
        """Layers of a mixer that write to the residual stream."""

    def initialize(self, mixer: Any, config: C, std: float) -> None:
        """What else of a mixer begins otherwise than it was made. std: of layers that read."""

    def arrange(
        self,
        config: C,
        tokens: Tensor,
        documents: Documents | None,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Rows of training as the mixers take them: tokens, and arguments that keep documents apart."""
        return tokens, {}

    def state_bytes(self, config: C, rows: Rows, dtype: torch.dtype, gpu: str | None = None) -> int:
        """What states take that forward of a mixer keeps for backward on this machine's GPU, or on one by its name."""
        return 0

    def keep_states(self, mixer: Any) -> None:
        """From now on forward of this mixer keeps its states for backward."""

    def decoder(self, norm: RMSNorm, mixer: Any, weights: Weights) -> Any:
        """x + mixer(norm(x)) of a prompt and of one more token, as `Layer` has them, with weights for generation."""
        return Layer(norm, mixer, weights)

    @abstractmethod
    def work(self, config: C, context: int) -> tuple[float, float]:
        """Of a mixer: weights of its matrix products, and operations per token of its forward besides them."""

    def flops_per_token(self, config: C, context: int) -> float:
        """Of training, forward and backward: six per weight of a matrix product, and the mixer's own."""
        weights, mixing = self.work(config, context)
        per_layer = 2 * (weights + 3 * config.dim * config.feed_forward) + mixing
        return 3 * (config.layers * per_layer + 2 * config.dim * config.vocab)

    def input_gate_max(self, mixer: Any) -> Tensor | None:
        """The largest input gate pre-activation of the last training step, for the log."""
        return None
