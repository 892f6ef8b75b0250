"""What a model is and how it is trained: plain data, with the paper's sizes and recipe (appendix E.2) as presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tfla._options import unknown
from tfla.lm.fields import Count, NotNegative, Positive, Range, check_fields, from_dict, option, replace
from tfla.lm.models import ModelConfig, find

Parallel = Literal["ddp", "fsdp"]
KeepForBackward = Literal["denominators", "states", "auto"]
Steps = Annotated[int, Range(at_least=0)]
Seed = Annotated[int, Range(at_least=0, at_most=2**43)]  # the order of data multiplies it, within 64 bits


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. The defaults are the paper's; rate, batch and steps belong to the size."""

    lr: Positive = option("peak learning rate")
    batch: Count = option("sequences per step, over all ranks")
    steps: Count = option("updates of the whole run")
    context: Count = option("tokens of a sequence", 8192)
    warmup: Steps = option("first steps, from a rate of 0", 750)
    cooldown: Steps = option("last steps, to a rate of 0", 1000)
    min_lr: Annotated[float, Range(at_least=0, at_most=1)] = option("where the cosine ends, as a part of lr", 0.1)
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)] = option("of AdamW", (0.9, 0.95))
    adam_eps: NotNegative = option("of AdamW", 1e-8)
    weight_decay: NotNegative = option("on weights of linear layers", 0.1)
    clip: Positive = option("largest gradient norm", 0.5)
    seed: Seed = option("of weights and order", 0)
    micro_batch: Count | None = option("sequences at a time on one rank; none: all", None)
    parallel: Parallel = option("how several ranks hold the model", "ddp")
    context_parallel: Count = option("ranks that share a sequence", 1)
    checkpoint_activations: bool = option("compute activations again in backward", False)
    keep_for_backward: KeepForBackward = option(
        "what layers leave for backward on a GPU; auto: states in as many as the budget has room for", "denominators"
    )
    keep_budget_gb: NotNegative | None = option("for states, with auto: of all layers together", None, unit="GB")
    compile: bool = option("torch.compile, block by block", False)
    dtype: Literal["float32", "bfloat16"] | None = option(
        "of the computation; without it bfloat16 on CUDA, else float32", None
    )

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
        if (self.keep_budget_gb is not None) != (self.keep_for_backward == "auto"):
            raise ValueError(
                f"tfla: keep_budget_gb is {self.keep_budget_gb} with keep_for_backward {self.keep_for_backward!r}; "
                "'auto' needs a number, and no other takes one"
            )


# Table of appendix E.2; 4, 8, 16 heads are its other choices for the two larger sizes, 12 for 160m. Kinds of models say
# where their sizes are others.
PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(layers=4, dim=128, heads=2),
    "160m": ModelConfig(layers=12, dim=768, heads=6),
    "400m": ModelConfig(layers=24, dim=1024, heads=8),
    "1.4b": ModelConfig(layers=24, dim=2048, heads=8),
    "7b": ModelConfig(layers=32, dim=4096, heads=8),
}
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
    size = PRESETS[name]
    return replace(size, {**find(changes.get("kind", size.kind)).sizes.get(name, {}), **changes})


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
