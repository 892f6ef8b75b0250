"""Language models on the mLSTM: the paper's xLSTM, its training recipe, evaluation and generation.

python -m tfla.lm --help
"""

from tfla.lm import _moved as _moved
from tfla.lm import _waiting as _waiting  # before anything that imports torch
from tfla.lm.config import PRESETS, RECIPES, ModelConfig, Recipe, preset, recipe
from tfla.lm.decoder import Decoder
from tfla.lm.model import LanguageModel, Losses
from tfla.lm.models.layers import Documents

__all__ = [
    "PRESETS",
    "RECIPES",
    "Decoder",
    "Documents",
    "LanguageModel",
    "Losses",
    "ModelConfig",
    "Recipe",
    "preset",
    "recipe",
]
