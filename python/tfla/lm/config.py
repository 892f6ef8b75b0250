"""What a model is and how it is trained: plain data, with the paper's sizes and recipe (appendix E.2) as presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tfla._options import Normalizer, unknown
from tfla.lm.fields import Count, NotNegative, Positive, Range, check_fields, from_dict, replace

Kind = Literal["xlstm", "transformer"]
InputGate = Literal["exp", "sigmoid"]
Reset = Literal["exact", "soft"]
Norm = Literal["layer", "rms"]
Parallel = Literal["ddp", "fsdp"]
Width = Annotated[int, Range(at_least=1, at_most=2**20)]  # more is a slip of the hand, not a model
Factor = Annotated[float, Range(above=0, at_most=64)]
Seed = Annotated[int, Range(at_least=0, at_most=2**43)]  # the order of data multiplies it, within 64 bits
SOFT_RESET = -25.0  # the paper's forget gate at the first token of a document


def feed_forward_dim(dim: int) -> int:
    """8/3 of dim, to a multiple of 64 as the published PyTorch models round it (2048 for dim 768, not 2112)."""
    return int((dim * 2.6667 + 63) // 64 * 64)


@dataclass(frozen=True)
class ModelConfig:
    """An xLSTM, or the Llama-style Transformer of the same width beside it."""

    layers: Width
    dim: Width
    heads: Width
    vocab: Annotated[int, Range(at_least=1, at_most=2**31)] = 50304
    kind: Kind = "xlstm"
    ffn_dim: Width | None = None  # None: feed_forward_dim(dim)
    qk_factor: Factor = 0.5  # dimension of all query/key heads, as a multiple of dim
    v_factor: Factor = 1.0
    gate: InputGate = "exp"
    normalizer: Normalizer | None = None  # None: the paper's for the gate
    eps: NotNegative = 1e-6  # in the denominator of the cell
    norm_eps: NotNegative = 1e-6  # of the norms before layers and head
    cell_norm: Norm = "layer"  # the norm per head after the cell
    cell_norm_eps: NotNegative = 1e-6
    gate_soft_cap: Positive | None = 15.0
    logit_soft_cap: Positive | None = 30.0
    input_gate_bias: float = -10.0
    forget_gate_bias: tuple[float, float] = (3.0, 6.0)  # evenly spaced over heads
    train_input_gate: bool = True  # False: the input gate stays at its bias
    zero_output_gate: bool = True  # output gate weights begin at zero, as in the paper's code
    reset: Reset = "exact"  # state at the first token of a document; "soft": a forget gate of -25
    chunk_size: Count | None = None
    rope_base: Positive = 10000.0  # Transformer only
    fuse: bool = False  # one product for projections of the same input

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind == "transformer" and (self.dim % self.heads or (self.dim // self.heads) % 2):
            raise ValueError(
                f"tfla: heads is {self.heads} for dim {self.dim}; heads of a Transformer have an even size"
            )

    @property
    def feed_forward(self) -> int:
        return self.ffn_dim if self.ffn_dim is not None else feed_forward_dim(self.dim)


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. The defaults are the paper's; rate, batch and steps belong to the size."""

    lr: Positive
    batch: Count  # sequences per step, over all ranks
    steps: Count
    context: Count = 8192
    warmup: Annotated[int, Range(at_least=0)] = 750
    cooldown: Annotated[int, Range(at_least=0)] = 1000
    min_lr: Annotated[float, Range(at_least=0, at_most=1)] = 0.1  # where the cosine ends, as a part of lr
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)] = (0.9, 0.95)
    adam_eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.1
    clip: Positive = 0.5
    seed: Seed = 0
    micro_batch: Count | None = None  # sequences at a time on one rank; None: all of them
    parallel: Parallel = "ddp"
    context_parallel: Count = 1  # ranks that share a sequence
    checkpoint_activations: bool = False
    compile: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None  # of the computation; None: bfloat16 on CUDA, else float32

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup + self.cooldown > self.steps:
            raise ValueError(
                f"tfla: steps is {self.steps}; it must be at least warmup + cooldown, {self.warmup} + {self.cooldown}"
            )
        if self.context % self.context_parallel:
            raise ValueError(
                f"tfla: context is {self.context}; it must be a multiple of context_parallel, {self.context_parallel}"
            )


# Table of appendix E.2; 4, 8, 16 heads are its other choices for the two larger sizes, 12 for 160m.
PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(layers=4, dim=128, heads=2),
    "160m": ModelConfig(layers=12, dim=768, heads=6),
    "400m": ModelConfig(layers=24, dim=1024, heads=8),
    "1.4b": ModelConfig(layers=24, dim=2048, heads=8),
    "7b": ModelConfig(layers=32, dim=4096, heads=8),
}
TRANSFORMER_HEADS = {"tiny": 2, "160m": 12, "400m": 16, "1.4b": 16, "7b": 32}
RECIPES: dict[str, Recipe] = {
    "tiny": Recipe(lr=3e-3, batch=8, steps=500, context=256, warmup=50, cooldown=50),
    "160m": Recipe(lr=3e-3, batch=128, steps=36000),
    "400m": Recipe(lr=1e-3, batch=128, steps=46000),
    "1.4b": Recipe(lr=8e-4, batch=256, steps=31000),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """A size of the paper with some fields changed: preset("160m", gate="sigmoid", heads=12)."""
    if name not in PRESETS:
        raise unknown("preset", name, tuple(PRESETS))
    if changes.get("kind") == "transformer":
        changes.setdefault("heads", TRANSFORMER_HEADS[name])
    return replace(PRESETS[name], changes)


def recipe(name: str, **changes: Any) -> Recipe:
    """The recipe of a size with some fields changed."""
    if name not in PRESETS:
        raise unknown("preset", name, tuple(PRESETS))
    if name not in RECIPES:
        missing = [field for field in ("lr", "batch", "steps") if field not in changes]
        if missing:
            raise ValueError(f"tfla: the paper trains no {name}; give {', '.join(missing)}")
        return from_dict(Recipe, changes)
    return replace(RECIPES[name], changes)


# What --help says of the fields.
HELP: dict[str, str] = {
    "layers": "blocks",
    "dim": "width of the residual stream",
    "heads": "heads of the sequence layer",
    "kind": "xlstm, or the Transformer beside it",
    "ffn_dim": "width of the feed-forward layer; none: 8/3 of dim",
    "qk_factor": "all query/key heads together, as a multiple of dim",
    "v_factor": "all value heads together, as a multiple of dim",
    "gate": "input gate: mLSTMexp or mLSTMsig",
    "normalizer": "denominator; without it the paper's for the gate",
    "eps": "in the denominator",
    "norm_eps": "of the norms before layers and head",
    "cell_norm": "norm per head after the cell",
    "cell_norm_eps": "of that norm",
    "gate_soft_cap": "of gate pre-activations; none: no cap",
    "logit_soft_cap": "of logits; none: no cap",
    "input_gate_bias": "at the beginning",
    "forget_gate_bias": "at the beginning, of the first and the last head",
    "train_input_gate": "or leave the input gate at its bias",
    "zero_output_gate": "output gate weights begin at zero",
    "reset": "where a document begins: exact, or a forget gate of -25",
    "chunk_size": "of the kernels; none: the plan's choice",
    "rope_base": "of the Transformer's positions",
    "fuse": "one product for projections of the same input",
    "lr": "peak learning rate",
    "batch": "sequences per step, over all ranks",
    "steps": "updates of the whole run",
    "context": "tokens of a sequence",
    "warmup": "first steps, from a rate of 0",
    "cooldown": "last steps, to a rate of 0",
    "min_lr": "where the cosine ends, as a part of lr",
    "betas": "of AdamW",
    "adam_eps": "of AdamW",
    "weight_decay": "on weights of linear layers",
    "clip": "largest gradient norm",
    "seed": "of weights and order",
    "micro_batch": "sequences at a time on one rank; none: all",
    "parallel": "how several ranks hold the model",
    "context_parallel": "ranks that share a sequence",
    "checkpoint_activations": "compute activations again in backward",
    "compile": "torch.compile, block by block",
    "dtype": "of the computation; without it bfloat16 on CUDA, else float32",
}
