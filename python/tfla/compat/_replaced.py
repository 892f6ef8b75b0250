"""Functions that layers of transformers call from the module that defines them, replaced there.

Such a replacement holds for all models of a module, also for those made before.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

Function = Callable[..., Any]


class Functions:
    """What stands for the functions of some names, in modules of transformers whose layers call all of them."""

    def __init__(self, families: tuple[str, ...], substitutes: dict[str, Callable[[Function], Function]]) -> None:
        """families: whose modules are known; substitutes: by the name of a function what makes another of it."""
        self.families, self.substitutes = families, substitutes
        self._originals: dict[ModuleType, dict[str, Function]] = {}

    def modules_of(self, model: nn.Module) -> set[ModuleType]:
        """The modules whose functions the layers of a model call."""
        homes = {sys.modules[type(layer).__module__] for layer in model.modules() if self._called_by(type(layer))}
        return {home for home in homes if all(hasattr(home, name) for name in self.substitutes)}

    def _called_by(self, layer: type[nn.Module]) -> bool:
        code = getattr(inspect.unwrap(layer.forward), "__code__", None)
        return code is not None and self.substitutes.keys() <= set(code.co_names)

    def known_modules(self) -> set[ModuleType]:
        """Those of the families that the installed transformers has."""
        found = set()
        for family in self.families:
            name = f"transformers.models.{family}"
            if importlib.util.find_spec(name) is None:
                continue
            module = importlib.import_module(f"{name}.modeling_{family}")
            classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, nn.Module)]
            if any(self._called_by(x) for x in classes):
                found.add(module)
        return found

    def replace(self, modules: set[ModuleType]) -> None:
        for module in modules - self._originals.keys():
            self._originals[module] = {name: getattr(module, name) for name in self.substitutes}
            for name, original in self._originals[module].items():
                setattr(module, name, self.substitutes[name](original))

    def restore(self) -> None:
        for module, functions in self._originals.items():
            for name, original in functions.items():
                setattr(module, name, original)
        self._originals.clear()
