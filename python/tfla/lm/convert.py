"""Weights in the layouts of published packages, as safetensors, there and back.

Which packages, and what of a model they can say, belongs to its kind (`tfla.lm.models`).
"""

from __future__ import annotations

import importlib
import json
import re
import reprlib
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfla._options import unknown
from tfla.lm.checks import bare_name, read_object
from tfla.lm.fields import from_dict
from tfla.lm.model import LanguageModel
from tfla.lm.models.base import KINDS, Exchange, ModelConfig, kinds_that


def layouts() -> tuple[str, ...]:
    """That some kind of model is exported to."""
    return tuple(dict.fromkeys(name for kind in KINDS.values() if kind.exchange for name in kind.exchange.layouts))


def _exchange(config: ModelConfig, layout: str) -> Exchange[Any]:
    if layout not in layouts():
        raise unknown("layout", layout, layouts())
    exchange = KINDS[config.kind].exchange
    if exchange is None or layout not in exchange.layouts:
        raise ValueError(
            f"tfla: kind is {config.kind!r}, which the layout {layout!r} cannot say; only its own can be exported"
        )
    return exchange


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("tfla: export and import need the package safetensors; pip install safetensors") from None
    return safetensors.torch


def _yaml(values: dict[str, Any]) -> str:
    """YAML reads 1e-06 as a text; with a point it is a number."""

    def scalar(value: Any) -> str:
        text = json.dumps(value)
        return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text

    return "".join(f"{name}: {scalar(value)}\n" for name, value in values.items())


def export(
    model: LanguageModel, out: Path, layout: str, *, dtype: torch.dtype = torch.float32, eod: int | None = None
) -> None:
    """A folder that xlstm's load_from_pretrained, or transformers' from_pretrained, takes."""
    exchange = _exchange(model.config, layout)
    config = exchange.fields(model.config, layout, eod)
    if out.exists():
        raise FileExistsError(f"tfla: {out} exists; give another folder, or remove it")
    weights = model.state_dict()
    theirs = {name: weights[ours].to(dtype).contiguous() for ours, name in exchange.keys(model.config, layout).items()}
    library = _safetensors()
    out.mkdir(parents=True)
    try:
        file = out / "model.safetensors"
        try:
            library.save_file(theirs, file, metadata={"format": "pt"})
        except Exception as error:  # the library's own error type, of a full disk too
            raise ValueError(f"tfla: {file} cannot be written: {error}") from None
        name = exchange.layouts[layout]
        if not name.endswith(".yaml"):
            config["torch_dtype"] = str(dtype).removeprefix("torch.")
        (out / name).write_text(_yaml(config) if name.endswith(".yaml") else json.dumps(config, indent=1) + "\n")
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
    """Weights, config and the config's file."""
    library = _safetensors()
    if not path.is_dir():
        raise FileNotFoundError(f"tfla: {path} is not a folder with model.safetensors")
    config = next((path / name for name in ("config.json", "config.yaml") if (path / name).exists()), None)
    if config is None:
        raise FileNotFoundError(f"tfla: {path} has neither config.json nor config.yaml")
    values = _read_config(config)
    weights: dict[str, Tensor] = {}
    for file in _weight_files(path):
        try:
            weights |= library.load_file(file)
        except FileNotFoundError:
            raise FileNotFoundError(f"tfla: {file} is missing; the index names it") from None
        except Exception as error:  # the library's own error type
            raise ValueError(f"tfla: {file} is not safetensors, or it was cut off: {error}") from None
    for key, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"tfla: {key} of {path} is {weight.dtype}; weights must be floating-point numbers")
    return weights, values, config


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"tfla: {path} holds no .safetensors file")
        return files
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"tfla: {index} has no weight_map, the file of each weight")
    return [path / name for name in sorted({bare_name(name, index) for name in names.values()})]


def _read_config(file: Path) -> dict[str, Any]:
    if file.suffix == ".json":
        return read_object(file)
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ImportError("tfla: config.yaml needs the package PyYAML; pip install PyYAML") from None
    try:
        values = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"tfla: {file} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"tfla: {file} holds {reprlib.repr(values)}; it must hold fields with their values")
    return values


def _recognised(weights: dict[str, Tensor], path: Path) -> tuple[str, Exchange[Any], str]:
    """The kind of weights, how it is exchanged, and their layout."""
    for name, kind in KINDS.items():
        layout = None if kind.exchange is None else kind.exchange.recognise(weights)
        if kind.exchange is not None and layout is not None:
            return name, kind.exchange, layout
    raise ValueError(f"tfla: {path} holds no weights of a published {kinds_that('exchange')}")


def import_model(path: Path) -> LanguageModel:
    """A model from any layout."""
    weights, given, file = _read(path)
    kind, exchange, layout = _recognised(weights, path)
    fields, weights = exchange.read(weights, layout, given, path, file)
    config = from_dict(ModelConfig, {"kind": kind, **fields})
    keys = exchange.keys(config, layout)
    missing = sorted(set(keys.values()) - weights.keys())
    extra = sorted(weights.keys() - set(keys.values()))
    if missing or extra:
        what = f"no weight {missing[0]}" if missing else f"a weight {extra[0]} that tfla.lm has no place for"
        raise ValueError(f"tfla: {path} has {what}")
    try:
        with torch.device("meta"):  # shapes are compared before memory is taken for them
            expected = LanguageModel(config).state_dict()
    except ValueError as error:
        raise ValueError(f"tfla: {path} has weights of sizes that do not fit: {str(error)[6:]}") from None
    state = {ours: weights[theirs].float() for ours, theirs in keys.items()}
    for name, parameter in expected.items():
        if state[name].shape != parameter.shape:
            shapes = f"{tuple(state[name].shape)}; it must be {tuple(parameter.shape)}"
            raise ValueError(f"tfla: {keys[name]} of {path} has shape {shapes}")
    model = LanguageModel(config)
    model.load_state_dict(state)
    return model
