"""What is checked before work begins, and which errors a user reads as one sentence."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

JSON_ERRORS = (ValueError, RecursionError)  # of json.loads
OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


def is_whole(value: object) -> bool:
    """A whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def bare_name(name: object, file: Path) -> str:
    """A name that `file` gives: of a file beside it, so that what others wrote leads nowhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\\", "\0"}:
        raise ValueError(f"tfla: {file} names a file {name!r}; it must be the bare name of a file beside it")
    return name


def check_positive(name: str, value: object, otherwise: str = "") -> None:
    if not isinstance(value, int) or not is_whole(value) or value <= 0:
        raise ValueError(f"tfla: {name} is {value!r}; it must be a positive whole number{otherwise}")


def check_output(name: str, file: Path | None) -> None:
    """Before the work whose result goes there, not after it."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"tfla: {name} is {file}, a folder; it must be a file")
    if not file.parent.is_dir():
        raise ValueError(f"tfla: {name} is {file}; there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"tfla: {name} is {file}, which may not be written")


def why_not_json(error: Exception) -> str:
    """The reason in an error of json.loads."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "a number has too many digits"


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds one object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"tfla: {file}: not JSON: it is not UTF-8") from None
    except JSON_ERRORS as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"tfla: {file}{line}: not JSON: {why_not_json(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"tfla: {file} holds {reprlib.repr(value)}; it must hold an object")
    return value


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """An error of writing or reading, such as a full disk, does not know its file by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def out_of_memory(error: BaseException) -> bool:
    """torch says it in several ways, some of them plain RuntimeErrors."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def sentence(error: BaseException) -> str | None:
    """What a user reads instead of a traceback; None where the error is in the program."""
    text = str(error)
    if text.startswith("tfla:"):
        return text
    if out_of_memory(error):
        reason = text.strip().splitlines()[0] if text.strip() else "the system has no more"
        return f"tfla: memory does not suffice: {reason}"
    if isinstance(error, OSError) and error.strerror:
        file = "" if error.filename is None else f"{error.filename}: "
        return f"tfla: {file}{error.strerror}"
    return None
