"""Configurations as dataclasses that check the types of their fields and travel through dictionaries."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")


def replace(config: _T, changes: dict[str, Any]) -> _T:
    return from_dict(type(config), {**to_dict(config), **changes})


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(cls: type[_T], values: dict[str, Any]) -> _T:
    """The inverse of to_dict, also after a way through JSON, where tuples are lists."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            raise ValueError(f"tfla: {name} is not a field of {cls.__name__}; it has {', '.join(sorted(names))}")
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def check_types(config: Any) -> None:
    """Configurations come from files and command lines: a wrong type would only be noticed far from there."""
    for name, kind in field_types(type(config)).items():
        value = getattr(config, name)
        if not _accepts(kind, value):
            raise ValueError(f"tfla: {name} is {value!r}; it must be {_words(kind)}")


def _accepts(kind: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(part, value) for part in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_accepts, arguments, value))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in arguments)
    if origin is Literal:
        return " or ".join(repr(part) for part in arguments)
    if origin is tuple:
        return f"{len(arguments)} of {_words(arguments[0])}"
    names = {int: "a whole number", float: "a number", bool: "True or False", types.NoneType: "None", str: "a text"}
    return names.get(kind, str(kind))
