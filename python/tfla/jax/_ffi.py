"""libtfla_jax.so as JAX sees it: registered with XLA, called with arrays, asked about shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from tfla import _native, info
from tfla._options import CODES, OPTIONS, encode_all

FORWARD, BACKWARD, STEP = 0, 1, 2
_OPERATIONS = ("forward", "backward", "step")
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
_LARGEST_RANK = 8


class _Tensor(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int32), ("rank", ctypes.c_int32), ("shape", ctypes.c_int64 * _LARGEST_RANK))


_library = ctypes.CDLL(_native.library("libtfla_jax.so"))
_library.tfla_jax_check.restype = ctypes.c_char_p
_library.tfla_jax_flag_names.restype = _library.tfla_jax_number_names.restype = ctypes.c_char_p
_library.tfla_jax_check.argtypes = (
    ctypes.c_int32,
    ctypes.POINTER(_Tensor),
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(ctypes.c_double),
)
for _name in _OPERATIONS:
    for _platform, _suffix in (("cpu", "cpu"), ("CUDA", "cuda")):
        _handler = jax.ffi.pycapsule(getattr(_library, f"tfla_jax_{_name}_{_suffix}"))
        jax.ffi.register_ffi_target(f"tfla_mlstm_{_name}", _handler, platform=_platform)


_FLAGS, _NUMBERS = (
    getattr(_library, name)().decode().split(", ") for name in ("tfla_jax_flag_names", "tfla_jax_number_names")
)
_CAST: dict[str, Callable[[Any], Any]] = {
    "int": int, "bool": bool, "float": float, "float?": lambda x: None if x is None else float(x),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a call is told besides its arrays; hashable, as JAX wants of everything static."""

    values: tuple  # in the order of OPTIONS, as operators take them

    @classmethod
    def parse(cls, *given: Any) -> Options:
        """The first few of OPTIONS; the others are at their defaults."""
        everything = (*given, *(option.default for option in OPTIONS[len(given) :]))
        codes = encode_all(everything)
        return cls(tuple(_CAST[option.type](code) for option, code in zip(OPTIONS, codes, strict=True)))

    def _named(self) -> dict[str, Any]:
        return {option.argument: value for option, value in zip(OPTIONS, self.values, strict=True)}

    def __getitem__(self, argument: str) -> Any:
        return self._named()[argument]

    def encode(
        self, *, state: bool, index: bool, C: bool = False, n: bool = False, saved: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The arrays `flags` and `numbers` of bindings/jax_call.h."""
        named = self._named()
        named |= {f"has_{name}": value is not None for name, value in named.items()}
        named |= {"has_state": state, "has_index": index, "has_C": C, "has_n": n, "has_saved": saved}
        flags = [named[name] for name in _FLAGS]
        return np.array(flags, np.int64), np.array([named[name] or 0.0 for name in _NUMBERS], np.float64)


def saved_bytes(
    options: Options, batch: int, tokens: int, heads: int, dqk: int, dhv: int, dtype: Any, sequences: int | None
) -> int:
    """Of what forward of such a call leaves for backward on the GPU."""
    keep: Any = next(word for word, code in CODES.keep.items() if code == options["keep"])
    return info.saved(
        batch=batch, tokens=tokens, heads=heads, dqk=dqk, dhv=dhv, dtype=dtype, keep=keep, sequences=sequences,
        chunk_size=options["chunk_size"],
    ).bytes  # fmt: skip


def check(
    operation: int, names: Sequence[str], arrays: Sequence[Array], flags: np.ndarray, numbers: np.ndarray
) -> None:
    """Raises what tfla has to say about shapes, dtypes and options, while a function is traced."""
    tensors = (_Tensor * len(arrays))()
    for tensor, name, array in zip(tensors, names, arrays, strict=True):
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"tfla: {name} has dtype {array.dtype.name}; it must be one of {', '.join(_DTYPES)}")
        tensor.dtype = _DTYPES.index(array.dtype.name)
        tensor.rank = min(array.ndim, _LARGEST_RANK)
        tensor.shape[: tensor.rank] = array.shape[: tensor.rank]
    sentence = _library.tfla_jax_check(
        operation,
        tensors,
        len(arrays),
        flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)),
        numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_double)),
    )
    if sentence is not None:
        raise ValueError(sentence.decode())


# How an array varies over the axes of a mesh inside shard_map is part of its type, under a name that has changed:
# `vma` before jax 0.10, `manual_axis_type` since.
def _variation(array: Array) -> tuple[str, Any] | None:
    of_type = jax.typeof(array)
    return next(((x, getattr(of_type, x)) for x in ("manual_axis_type", "vma") if hasattr(of_type, x)), None)


def varying_axes(array: Array) -> frozenset[str]:
    variation = _variation(array)
    return frozenset() if variation is None else getattr(variation[1], "varying", variation[1])


def like(array: Array, shape: Sequence[int] | None = None, dtype: jax.typing.DTypeLike | None = None):
    """A result that varies over a mesh as `array` does."""
    shape = array.shape if shape is None else tuple(shape)
    variation, keywords = _variation(array), {}
    if variation is not None and varying_axes(array):
        sharding = NamedSharding(jax.typeof(array).sharding.mesh, PartitionSpec(*(None,) * len(shape)))
        keywords = {variation[0]: variation[1], "sharding": sharding}
    return jax.ShapeDtypeStruct(shape, dtype or array.dtype, **keywords)


def call(
    operation: int,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[Array],
    flags: np.ndarray,
    numbers: np.ndarray,
    aliases: dict[int, int] | None = None,
) -> Sequence[Array]:
    # Every array gets the axis of a vmap in front; the binding merges it into the batch.
    run = jax.ffi.ffi_call(
        f"tfla_mlstm_{_OPERATIONS[operation]}",
        tuple(results),
        vmap_method="broadcast_all",
        input_output_aliases=aliases,
    )
    return run(*arrays, flags=flags, numbers=numbers)
