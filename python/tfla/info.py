"""What this installation is and would run; needs neither torch nor jax."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Literal, NamedTuple

from tfla import _native
from tfla._options import unknown

Operation = Literal["forward", "backward", "step"]
Device = Literal["cpu", "cuda"]
DType = Literal["float32", "float64", "bfloat16", "float16"]
Keep = Literal["nothing", "denominators", "states"]

OPERATIONS = {"forward": 0, "backward": 1, "step": 2}
DEVICES = {"cpu": 0, "cuda": 1}
DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
KEEPS = {"nothing": 0, "denominators": 1, "states": 2}


class _Request(ctypes.Structure):
    """As in bindings/info.cc."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "heads", "dqk", "dhv", "sequences", "chunk_size")),
        *((name, ctypes.c_int32) for name in ("operation", "device", "dtype", "keep")),
        ("gpu", ctypes.c_char_p),
    )


class _Saved(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("bytes", "chunk", "keep"))


class Saved(NamedTuple):
    """What forward leaves for backward."""

    bytes: int
    keep: Keep  # less than was asked for where the kernels do not keep that
    chunk: int  # tokens from one state to the next


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


def _asked(function: Any, *results: Any, **request: Any) -> str:
    """The answer of a function of the library; RuntimeError with the reason where there is none."""
    for name, codes in (("operation", OPERATIONS), ("device", DEVICES), ("dtype", DTYPES), ("keep", KEEPS)):
        if request[name] not in codes:
            raise unknown(name, request[name], tuple(codes))
        request[name] = codes[request[name]]
    gpu = request.pop("gpu")
    text = ctypes.c_char_p()
    asked = _Request(**request, gpu=None if gpu is None else gpu.encode())
    status = function(ctypes.byref(asked), *map(ctypes.byref, results), ctypes.byref(text))
    answer = (text.value or b"").decode()
    if status != 0:
        raise RuntimeError(answer)
    return answer


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
    keep: Keep = "nothing",
    gpu: str | None = None,
) -> str:
    """The plan of such a call, in words. RuntimeError with the reason where this build or machine cannot run it.

    keep: what forward leaves for backward. gpu: with device "cuda" one that need not be here, such as "H200".
    """
    return _asked(
        _library().tfla_describe, operation=operation, batch=batch, tokens=tokens, heads=heads, dqk=dqk, dhv=dhv,
        sequences=-1, chunk_size=0, device=device, dtype=dtype, keep=keep, gpu=gpu,
    )  # fmt: skip


def saved(
    *,
    batch: int = 1,
    tokens: int,
    heads: int,
    dqk: int,
    dhv: int,
    dtype: DType = "bfloat16",
    keep: Keep,
    sequences: int | None = None,
    chunk_size: int | None = None,
    device: Device = "cuda",
    gpu: str | None = None,
) -> Saved:
    """What forward of such a call leaves for backward where `keep` is asked for: how many bytes, and of what.

    sequences: as many are packed into one row of `tokens` (then batch is 1). gpu: one that need not be here, such as
    "H200". RuntimeError with the reason where this build or machine cannot run the call.
    """
    found = _Saved()
    _asked(
        _library().tfla_saved, found, operation="forward", batch=batch, tokens=tokens, heads=heads, dqk=dqk, dhv=dhv,
        sequences=-1 if sequences is None else sequences, chunk_size=chunk_size or 0, device=device,
        dtype=dtype, keep=keep, gpu=gpu,
    )  # fmt: skip
    words: Any = list(KEEPS)
    return Saved(found.bytes, words[found.keep], found.chunk)
