"""Which layers keep their states for backward: time for memory, layer by layer."""

from __future__ import annotations

import sys

from tfla.lm.config import Recipe
from tfla.lm.model import LanguageModel
from tfla.lm.models.base import Rows
from tfla.lm.training.parallel import World


def layers_within(budget: float, bytes_of_a_layer: int, layers: int) -> int:
    """As many as have room in a budget of gigabytes; all where they take nothing."""
    return layers if bytes_of_a_layer == 0 else min(layers, int(budget * 1e9) // bytes_of_a_layer)


def keep_for_backward(model: LanguageModel, recipe: Recipe, world: World, rows: Rows) -> int:
    """Has the first layers keep their states, as the recipe says. How many do. A CPU keeps none whatever is asked."""
    layers = 0 if recipe.keep_for_backward == "denominators" else model.config.layers
    if recipe.keep_budget_gb is not None:
        on_gpu = world.device.type == "cuda"
        each = model.kind.state_bytes(model.config, rows, model.dtype) if on_gpu else 0
        layers = layers_within(recipe.keep_budget_gb, each, layers)
        if world.first:
            print(
                f"tfla: {layers} of {model.config.layers} layers keep their states for backward, "
                f"{each / 1e9:.3f} GB each",
                file=sys.stderr,
            )
    for block in model.blocks[:layers]:
        model.kind.keep_states(block.mix)
    return layers
