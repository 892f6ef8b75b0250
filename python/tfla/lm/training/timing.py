"""A training step that is timed: forward, loss, backward, clipping and AdamW on rows of random tokens.

`python -m tfla.lm bench` times our own models with it, benchmarks/lm/step_time.py times published packages beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tfla.lm.config import KeepForBackward, ModelConfig, Recipe, preset, recipe
from tfla.lm.fields import Count, NotNegative, check_fields, option
from tfla.lm.model import LanguageModel
from tfla.lm.models.base import Rows
from tfla.lm.training.keeping import keep_for_backward
from tfla.lm.training.metrics import flops_per_token, peak_flops
from tfla.lm.training.optimizer import make_optimizer
from tfla.lm.training.parallel import World, find_device, spread


@dataclass(frozen=True)
class Setting:
    size: str = option("a preset")
    device: str | None = option("cpu or cuda; without it cuda where there is one", None)
    context: Count = option("tokens of a row", 8192)
    batch: Count = option("rows", 8)
    steps: Count = option("timed steps, after two", 5)
    compile: bool = option("torch.compile, block by block", True)
    fuse: bool = option("one product for projections of the same input", False)
    checkpoint_activations: bool = option("compute activations again in backward", False)
    keep_for_backward: KeepForBackward = option("what layers leave for backward on a GPU, as in train", "denominators")
    keep_budget_gb: NotNegative | None = option("for states, with auto", None, unit="GB")
    layers: Count | None = option("instead of the preset's", None)
    vocab: Count | None = option("instead of the preset's", None)

    def __post_init__(self) -> None:
        check_fields(self)
        find_device(self.device)
        self.recipe()  # refuses what does not go together

    @property
    def where(self) -> torch.device:
        return find_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.where.type == "cuda" else torch.float32

    def model(self, **fields: Any) -> ModelConfig:
        changes = {name: getattr(self, name) for name in ("layers", "vocab") if getattr(self, name) is not None}
        return preset(self.size, **fields, **changes, fuse=self.fuse)

    def recipe(self) -> Recipe:
        return recipe(
            self.size, lr=1e-4, batch=self.batch, steps=10_000, context=self.context, warmup=0, cooldown=0,
            compile=self.compile, checkpoint_activations=self.checkpoint_activations,
            keep_for_backward=self.keep_for_backward, keep_budget_gb=self.keep_budget_gb,
        )  # fmt: skip


def make_model(config: ModelConfig, setting: Setting) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A model as it is trained, and the sum of its losses."""
    training, world = setting.recipe(), World(device=setting.where)
    with setting.where:
        own = LanguageModel(config, setting.dtype)
        keep_for_backward(own, training, world, Rows(setting.batch, setting.context))
        model = spread(own, training, world)
    return model, lambda inputs, targets: model(inputs, targets).total


def make_step(
    module: nn.Module, total_loss: Callable[[Tensor, Tensor], Tensor], vocab: int, setting: Setting
) -> Callable[[], Tensor]:
    """A training step of a module; it returns the mean loss."""
    training, optimizer = setting.recipe(), make_optimizer(module, setting.recipe())
    tokens = torch.randint(0, vocab, (setting.batch, setting.context + 1), device=setting.where)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Tensor:
        loss = total_loss(inputs, targets) / inputs.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def median_seconds(call: Callable[[], object], repetitions: int, device: torch.device, warmup: int = 2) -> float:
    times = []
    for repetition in range(warmup + repetitions):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) * 1e-3
        else:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        if repetition >= warmup:
            times.append(seconds)
    return sorted(times)[len(times) // 2]


def report(name: str, config: ModelConfig, setting: Setting, seconds: float, loss: float) -> dict[str, Any]:
    """What is said of a step that took so long."""
    rate, peak = setting.batch * setting.context / seconds, peak_flops(setting.where)
    return {
        "model": name, "size": setting.size, "heads": config.heads, "batch": setting.batch, "context": setting.context,
        "milliseconds": 1e3 * seconds, "tokens_per_second": rate, "loss": loss,
        "mfu": None if peak is None else rate * flops_per_token(config, setting.context) / peak,
        "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9 if setting.where.type == "cuda" else None,
    }  # fmt: skip
