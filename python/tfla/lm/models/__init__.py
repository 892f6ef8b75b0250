"""The kinds of models. To add one: a file here that defines a `Kind` (see base.py), and a row below."""

from tfla.lm.models.base import KINDS, Kind, ModelConfig, all_fields, find, kinds_that
from tfla.lm.models.deltanet import DeltaNet
from tfla.lm.models.transformer import Transformer
from tfla.lm.models.xlstm import XLSTM

KINDS.update(
    {
        "xlstm": XLSTM(),
        "transformer": Transformer(),
        "deltanet": DeltaNet(),
    }
)

__all__ = ["KINDS", "Kind", "ModelConfig", "all_fields", "find", "kinds_that"]
