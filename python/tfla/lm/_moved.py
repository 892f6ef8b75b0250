"""Modules that have moved into folders: their old paths work in this version, with a warning, and not in the next."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDERS = {
    "data": ("description", "prepare", "tokenizer"),
    "models": ("init", "layers", "transformer"),
    "training": ("checkpoint", "lock", "loss", "metrics", "optimizer", "parallel", "storage", "train"),
}
MOVED = {f"tfla.lm.{name}": f"tfla.lm.{folder}.{name}" for folder, names in FOLDERS.items() for name in names}


class _Moved(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        sentence = f"tfla: {old} is {MOVED[old]} now; the old name works in this version, not in the next"
        warnings.warn(sentence, DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(MOVED[old])  # the module itself, not a copy of its names


sys.meta_path.append(_Moved())
