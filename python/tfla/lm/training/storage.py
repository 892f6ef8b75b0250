"""Tensors and plain values of a torch.distributed.checkpoint, written and read; nothing that is read is run.

torch reads `.metadata`, and entries that are not tensors, by a pickle that calls whatever the file names. Here the
metadata is unpickled into records without behaviour, of the few names that it consists of, and torch's own classes are
made from what they say; entries go through torch's weights-only unpickler.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tfla.lm.checks import bare_name

METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint."
_RECORDS = {
    *((_TORCH + "metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (_TORCH + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip
_DTYPES = {"float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"}


class _Record:
    """What a pickle says of an object: its state, and nothing of what its class would do."""

    state: Any = None

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Path) -> None:
        super().__init__(io.BytesIO(file.read_bytes()))
        self.file = file
        # Classes of this reading alone: a pickle can change attributes of those that it gets.
        self.records = {name: type(name[1], (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.records:
            return self.records[module, name]
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        raise ValueError(f"tfla: {self.file} names {module}.{name}; a checkpoint holds no such thing, do not trust it")


def _state(record: Any, kind: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise TypeError(f"no {kind}")
    return record.state


def _size(value: Any) -> torch.Size:
    return torch.Size(int(number) for number in value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(record, "TensorStorageMetadata")
    dtype = _state(state["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    parts = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    chunks = [ChunkStorageMetadata(_size(part["offsets"]), _size(part["sizes"])) for part in parts]
    return TensorStorageMetadata(TensorProperties(dtype), _size(state["size"]), chunks)


def _place(key: Any, value: Any, file: Path) -> tuple[MetadataIndex, _StorageInfo]:
    index, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
    file_name = bare_name(info["relative_path"], file)
    offset = None if index.get("offset") is None else _size(index["offset"])
    number = None if index.get("index") is None else int(index["index"])
    place = _StorageInfo(file_name, int(info["offset"]), int(info["length"]))
    return MetadataIndex(_text(index["fqn"]), offset, number), place


def read_metadata(file: Path) -> Metadata:
    """What torch.distributed.checkpoint wrote there, without running anything of it."""
    try:
        state = _state(_Unpickler(file).load(), "Metadata")
        return Metadata(
            {_text(name): _entry(entry) for name, entry in state["state_dict_metadata"].items()},
            planner_data={_text(name): tuple(path) for name, path in state["planner_data"].items()},
            storage_data=dict(_place(key, value, file) for key, value in state["storage_data"].items()),
            storage_meta=StorageMeta(),
            version=None if state.get("version") is None else _text(state["version"]),
        )
    except Exception as error:  # whatever a pickle that is none, or is another's, leads to
        if str(error).startswith("tfla:"):
            raise
        raise ValueError(f"tfla: {file} is not what torch.distributed.checkpoint writes: {_brief(error)}") from None


class _Reader(dcp.FileSystemReader):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = read_metadata(path / METADATA)  # here: an error in the method makes torch try other files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


def _brief(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):  # torch's sentences on it advise to load all the same
        return "it holds more than tensors and plain values"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _cause(error: dcp.CheckpointException) -> BaseException:
    """The first rank's own error: torch wraps all of them, an interruption too, in something that is no Exception."""
    return error.failures[min(error.failures)][0]


def _system(error: BaseException | None) -> BaseException | None:
    """The operating system's error behind another: of a full disk torch says that a position was unexpected."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def load(state: dict[str, Any], path: Path) -> None:
    """Fills state in place. Every rank calls it; shards may be others' than those that were saved."""
    reader = _Reader(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it loads without a process group, when there is one process
            dcp.load(state, storage_reader=reader, planner=_Planner())
    except dcp.CheckpointException as error:
        cause = _cause(error)
        if not isinstance(cause, Exception):
            raise cause from None
        raise ValueError(f"tfla: {path} cannot be loaded: {_brief(cause)}") from None


def save(state: dict[str, Any], path: Path) -> None:
    """Every rank calls it. Raises OSError where a file cannot be written."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=path)
    except dcp.CheckpointException as error:
        cause = _cause(error)
        raise (cause if not isinstance(cause, Exception) else OSError(_brief(_system(cause) or cause))) from None
