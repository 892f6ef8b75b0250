"""libtfla_jax.so as JAX sees it: registered with XLA, called with arrays, asked about shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from tfla import _native, _options, info

FORWARD, BACKWARD, STEP = 0, 1, 2
_OPERATIONS = ("forward", "backward", "step")
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
_LARGEST_RANK = 8


class _Tensor(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int32), ("rank", ctypes.c_int32), ("shape", ctypes.c_int64 * _LARGEST_RANK))


_library = ctypes.CDLL(_native.library("libtfla_jax.so"))
_CAST: dict[str, Callable[[Any], Any]] = {
    "int": int, "bool": bool, "float": float, "float?": lambda x: None if x is None else float(x),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a call is told besides its arrays; hashable, as JAX wants of everything static."""

    operator: Operator
    values: tuple  # in the order of the operator's rows, as operators take them

    def _named(self) -> dict[str, Any]:
        return {row.argument: value for row, value in zip(self.operator.table.rows, self.values, strict=True)}

    def __getitem__(self, argument: str) -> Any:
        return self._named()[argument]

    def encode(self, **given: bool) -> tuple[np.ndarray, np.ndarray]:
        """The arrays `flags` and `numbers` of bindings/jax_arrays.h. given: which of the arrays there are, where a flag
        says so."""
        named = self._named()
        named |= {f"has_{name}": value is not None for name, value in named.items()}
        named |= {f"has_{name}": there for name, there in given.items()}
        flags = [named.get(name, False) for name in self.operator.flags]
        numbers = [named[name] or 0.0 for name in self.operator.numbers]
        return np.array(flags, np.int64), np.array(numbers, np.float64)


class Operator:
    """An operator of the library, registered with XLA: its options, and how it is checked and called."""

    def __init__(self, name: str, table: _options.Table) -> None:
        self.name, self.table = name, table
        for operation in _OPERATIONS:
            for platform in ("cpu", "CUDA"):
                handler = getattr(_library, f"tfla_jax_{name}_{operation}_{platform.lower()}")
                target = f"tfla_{name}_{operation}"
                jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform=platform)
        self._check = getattr(_library, f"tfla_jax_{name}_check")
        self._check.restype = ctypes.c_char_p
        self._check.argtypes = (
            ctypes.c_int32,
            ctypes.POINTER(_Tensor),
            ctypes.c_int64,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.POINTER(ctypes.c_double),
        )
        self.flags, self.numbers = self._names("flag_names"), self._names("number_names")

    def _names(self, kind: str) -> list[str]:
        function = getattr(_library, f"tfla_jax_{self.name}_{kind}")
        function.restype = ctypes.c_char_p
        return function().decode().split(", ")

    def parse(self, *given: Any) -> Options:
        """The first few of the options; the others are at their defaults."""
        rows = self.table.rows
        codes = self.table.encode_all((*given, *(row.default for row in rows[len(given) :])))
        return Options(self, tuple(_CAST[row.type](code) for row, code in zip(rows, codes, strict=True)))

    def check(
        self, operation: int, names: Sequence[str], arrays: Sequence[Array], flags: np.ndarray, numbers: np.ndarray
    ) -> None:
        """Raises what tfla has to say about shapes, dtypes and options, while a function is traced."""
        tensors = (_Tensor * len(arrays))()
        for tensor, name, array in zip(tensors, names, arrays, strict=True):
            if array.dtype.name not in _DTYPES:
                raise ValueError(f"tfla: {name} has dtype {array.dtype.name}; it must be one of {', '.join(_DTYPES)}")
            tensor.dtype = _DTYPES.index(array.dtype.name)
            tensor.rank = min(array.ndim, _LARGEST_RANK)
            tensor.shape[: tensor.rank] = array.shape[: tensor.rank]
        sentence = self._check(
            operation,
            tensors,
            len(arrays),
            flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)),
            numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_double)),
        )
        if sentence is not None:
            raise ValueError(sentence.decode())

    def call(
        self,
        operation: int,
        results: Sequence[jax.ShapeDtypeStruct],
        arrays: Sequence[Array],
        flags: np.ndarray,
        numbers: np.ndarray,
        aliases: dict[int, int] | None = None,
    ) -> Sequence[Array]:
        # Every array gets the axis of a vmap in front; the binding merges it into the batch.
        run = jax.ffi.ffi_call(
            f"tfla_{self.name}_{_OPERATIONS[operation]}",
            tuple(results),
            vmap_method="broadcast_all",
            input_output_aliases=aliases,
        )
        return run(*arrays, flags=flags, numbers=numbers)


MLSTM, DELTA = Operator("mlstm", _options.MLSTM), Operator("delta_rule", _options.DELTA)


def saved_bytes(
    options: Options, batch: int, tokens: int, heads: int, dqk: int, dhv: int, dtype: Any, sequences: int | None
) -> int:
    """Of what forward of such a call leaves for backward on the GPU."""
    keep: Any = next(word for word, code in _options.CODES.keep.items() if code == options["keep"])
    return info.saved(
        batch=batch, tokens=tokens, heads=heads, dqk=dqk, dhv=dhv, dtype=dtype, keep=keep, sequences=sequences,
        chunk_size=options["chunk_size"],
    ).bytes  # fmt: skip


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


def vary_alike(tree: Any) -> Any:
    """As arrays that vary over the same axes of a mesh: inside shard_map a call wants all of them alike."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    axes = frozenset().union(*(varying_axes(x) for x in leaves))
    missing = [tuple(axes - varying_axes(x)) for x in leaves]
    leaves = [jax.lax.pcast(x, rest, to="varying") if rest else x for x, rest in zip(leaves, missing, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def last_state(options: Options, q: Array, v: Array, index: Array | None) -> list[jax.ShapeDtypeStruct]:
    """The shapes of C, n and m after the last token; the delta rule has the first."""
    sequences = v.shape[0] if index is None else index.shape[0] - 1
    shape = (sequences, v.shape[1 if options["head_first"] else 2], q.shape[3], v.shape[3])
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return [like(q, shape[:axes], dtype) for axes in (4, 3, 2)]
