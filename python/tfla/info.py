"""What this installation is and would run; needs neither torch nor jax."""

from __future__ import annotations

import ctypes
import functools
from typing import Literal

from tfla import _native

Operation = Literal["forward", "backward", "step"]
Device = Literal["cpu", "cuda"]
DType = Literal["float32", "float64", "bfloat16", "float16"]

OPERATIONS = {"forward": 0, "backward": 1, "step": 2}
DEVICES = {"cpu": 0, "cuda": 1}
DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_native.library("libtfla_info.so"))
    library.tfla_version.restype = ctypes.c_char_p
    library.tfla_scratch_alignment.restype = ctypes.c_int64
    return library


def library_version() -> str:
    """The version of libtfla."""
    return _library().tfla_version().decode()


@functools.cache
def scratch_alignment() -> int:
    """Bytes on whose multiples work space begins, and every vector in what forward keeps for backward."""
    return _library().tfla_scratch_alignment()


def describe(
    operation: Operation,
    *,
    batch: int = 1,
    tokens: int = 1,
    heads: int = 1,
    dqk: int,
    dhv: int,
    dtype: DType = "float32",
    device: Device = "cpu",
) -> str:
    """The plan of such a call, in words. RuntimeError with the reason where this build or machine cannot run it."""
    shape = (ctypes.c_int64 * 5)(batch, tokens, heads, dqk, dhv)
    text = ctypes.c_char_p()
    status = _library().tfla_describe(OPERATIONS[operation], DEVICES[device], DTYPES[dtype], shape, ctypes.byref(text))
    answer = (text.value or b"").decode()
    if status != 0:
        raise RuntimeError(answer)
    return answer
