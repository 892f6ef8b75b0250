"""AdamW with the paper's groups, and its learning rate over the steps."""

from __future__ import annotations

import math

import torch
from torch import nn

from tfla.lm.config import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Of update number `step`, counted from 0: linear from 0, cosine to min_lr of the peak, linear to 0 at the end."""
    cooling = recipe.steps - recipe.cooldown
    if step < recipe.warmup:
        return recipe.lr * step / recipe.warmup
    if step < cooling:
        progress = (step - recipe.warmup) / (cooling - recipe.warmup)
        return recipe.lr * (recipe.min_lr + (1 - recipe.min_lr) * 0.5 * (1 + math.cos(math.pi * progress)))
    if recipe.cooldown == 0:
        return recipe.lr * recipe.min_lr
    return recipe.lr * recipe.min_lr * max(recipe.steps - step, 0) / recipe.cooldown


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Weights of linear layers do, the head and the gates among them; biases, norms and the embedding do not."""
    return parameter.dim() == 2 and "embedding" not in name


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if decays(name, p)], "weight_decay": recipe.weight_decay},
        {"params": [p for name, p in trained if not decays(name, p)], "weight_decay": 0.0},
    ]
    on_gpu = all(parameter.is_cuda for _, parameter in trained)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.adam_eps, fused=on_gpu or None)
