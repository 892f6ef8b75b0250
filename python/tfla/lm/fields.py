"""Configurations as dataclasses: a field says its type, range, default and meaning once.

    lr: Positive = option("peak learning rate")
    min_lr: Annotated[float, Range(at_least=0, at_most=1)] = option("where the cosine ends, as a part of lr", 0.1)

Checks, command line and docs/lm.md take them from there. Configurations travel through dictionaries.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Range:
    """Which numbers a field admits, beside its type: `lr: Annotated[float, Range(above=0)]`."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def admits(self, value: float) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def words(self) -> str:
        positive = self.above == 0 or self.at_least == 1
        bounds = {"above": self.above, "at least": self.at_least} if not positive else {}
        bounds |= {"below": self.below, "at most": self.at_most}
        parts = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
        return " and ".join(["positive", *parts] if positive else parts)


Count = Annotated[int, Range(at_least=1)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]


def option(
    meaning: str,
    default: Any = dataclasses.MISSING,
    *,
    flag: str | None = None,
    unit: str | None = None,
    choices: Callable[[], tuple[str, ...]] | None = None,
) -> Any:
    """A field of a configuration. On the command line: flag, its name if that is another; unit, of its value; choices,
    where the type does not say them."""
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "flag": flag, "unit": unit, "choices": choices}
    )


def replace(config: _T, changes: dict[str, Any]) -> _T:
    return from_dict(type(config), {**to_dict(config), **changes})


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(cls: type[_T], values: dict[str, Any]) -> _T:
    """The inverse of to_dict, also after a way through JSON, where tuples are lists."""
    chosen: Any = cls
    if hasattr(cls, "choose"):  # the values say which class it is
        chosen, values = chosen.choose(values)
    fields = dataclasses.fields(chosen)
    names = {field.name for field in fields}
    for name in values:
        if name not in names:
            raise ValueError(f"tfla: {name} is not a field of {cls.__name__}; it has {', '.join(sorted(names))}")
    for field in fields:
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"tfla: {field.name} is missing; a {cls.__name__} has no default for it")
    return chosen(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def field_types(cls: type) -> dict[str, Any]:
    """Without ranges."""
    return typing.get_type_hints(cls)


def check_fields(config: Any) -> None:
    """Configurations come from files and command lines: a wrong value would only be noticed far from there."""
    for name, kind in typing.get_type_hints(type(config), include_extras=True).items():
        check(name, kind, getattr(config, name))


def check(name: str, kind: Any, value: Any) -> None:
    if not _accepts(kind, value):
        raise ValueError(f"tfla: {name} is {value!r}; it must be {_words(kind)}")
    if not all(math.isfinite(number) for number in _numbers(value) if isinstance(number, float)):
        raise ValueError(f"tfla: {name} is {value!r}; it must be finite")
    bounds = _range(kind)
    if bounds is not None and not all(map(bounds.admits, _numbers(value))):
        of_each = "each " if isinstance(value, tuple) else ""
        raise ValueError(f"tfla: {name} is {value!r}; it must {of_each}be {bounds.words()}")


def _numbers(value: Any) -> tuple[Any, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return tuple(x for x in values if isinstance(x, (int, float)) and not isinstance(x, bool))


def _range(kind: Any) -> Range | None:
    """The range inside a type, of which there is one at most."""
    if typing.get_origin(kind) is Annotated:
        return next((extra for extra in kind.__metadata__ if isinstance(extra, Range)), None)
    if typing.get_origin(kind) is Literal:
        return None
    return next((found for part in typing.get_args(kind) if (found := _range(part)) is not None), None)


def _accepts(kind: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _accepts(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(part, value) for part in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_accepts, arguments, value))
    if origin is dict:
        key, item = arguments
        return isinstance(value, dict) and all(_accepts(key, k) and _accepts(item, v) for k, v in value.items())
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in arguments)
    if origin is Literal:
        return " or ".join(repr(part) for part in arguments)
    if origin is tuple:
        return f"{len(arguments)} of {_words(arguments[0])}"
    if origin is dict:
        return "a dictionary"
    names = {
        int: "a whole number", float: "a number", bool: "True or False", types.NoneType: "None", str: "a text",
        Path: "a pathlib.Path",
    }  # fmt: skip
    return names.get(kind, str(kind))
