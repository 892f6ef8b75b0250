"""The packages beside which tfla.ssd, tfla.delta_rule and tfla.causal_conv1d are timed, imported from a folder where
one is given. peers_folder.py makes it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HUB = "huggingface_hub"


def use_folder(folder: Path | None) -> None:
    """Its packages come before those that are installed."""
    if folder is None:
        return
    if not folder.is_dir():
        raise SystemExit(f"benchmarks: --peers was {folder}, which is no folder")
    sys.path.insert(0, str(folder.resolve()))


def mamba_ssm(module: str) -> Any:
    """A module of mamba_ssm. The package's own __init__ imports all of its models, which need transformers: where that
    fails, modules are imported without it."""
    try:
        importlib.import_module("mamba_ssm")
    except ImportError:
        _import_without_init("mamba_ssm")
    _offer_mixin()
    return importlib.import_module(f"mamba_ssm.{module}")


def _import_without_init(package: str) -> None:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"No module named {package!r}")
    bare = ModuleType(package)
    bare.__path__ = list(found.submodule_search_locations)
    sys.modules[package] = bare


def _offer_mixin() -> None:
    """Mamba2 inherits a class that up- and downloads it. Where that class is missing, an empty one takes its place,
    while a layer is timed that is neither."""
    if HUB in sys.modules or importlib.util.find_spec(HUB) is not None:
        return
    stand_in = ModuleType(HUB)
    stand_in.PyTorchModelHubMixin = type("PyTorchModelHubMixin", (), {})  # type: ignore[attr-defined]
    sys.modules[HUB] = stand_in
