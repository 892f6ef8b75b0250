"""Flags of the command line from fields of configurations, and what several commands do with theirs."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from tfla.lm.decoder import Decoder
from tfla.lm.fields import field_types
from tfla.lm.model import LanguageModel
from tfla.lm.training.checkpoint import load_model
from tfla.lm.training.parallel import find_device


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _reading(kind: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = _reading(next(part for part in arguments if part is not types.NoneType))
        read = inner.get("type")
        if read not in (int, float):
            return inner
        return {**inner, "type": lambda text: None if text == "none" else read(text)}
    if origin is Literal:
        return {"choices": arguments}
    if origin is tuple:
        return {"type": arguments[0], "nargs": len(arguments)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kind}


def add_field(
    parser: Any, cls: type, field: dataclasses.Field, *, show_default: bool = False, required: bool = False
) -> None:
    """A flag that is in the namespace only if it is given."""
    about = field.metadata
    how = {"required": required, **_reading(field_types(cls)[field.name])}
    if about["choices"] is not None:
        how["choices"] = about["choices"]()
    if about["unit"] is not None:
        how["metavar"] = about["unit"]
    default = f"; default {field.default}" if show_default and type(field.default) in (int, float, str) else ""
    name = about["flag"] or field.name.replace("_", "-")
    parser.add_argument(f"--{name}", dest=field.name, default=argparse.SUPPRESS, help=about["meaning"] + default, **how)


def add_fields(
    parser: Any, cls: type, *, without: Iterable[str] = (), required: Iterable[str] = (), show_defaults: bool = True
) -> None:
    for field in dataclasses.fields(cls):
        if field.name not in without:
            add_field(parser, cls, field, show_default=show_defaults, required=field.name in required)


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """What the command line says of some fields."""
    values = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a run or one of its checkpoints")


def load(path: Path, device: str | None, **changes: Any) -> tuple[LanguageModel, dict[str, Any]]:
    """The model of a checkpoint, ready for use, and its checkpoint.json."""
    where = find_device(device)
    model, meta = load_model(path, torch.bfloat16 if where.type == "cuda" else torch.float32, **changes)
    return model.matrices_in_dtype().to(where).eval(), meta


def load_decoder(path: Path, device: str | None) -> tuple[Decoder, dict[str, Any]]:
    """The same for generation: weights go to the device once, as the decoder has them."""
    where = find_device(device)
    model, meta = load_model(path, torch.bfloat16 if where.type == "cuda" else torch.float32)
    return Decoder(model, device=where), meta
