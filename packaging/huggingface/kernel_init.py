"""tfla as a kernel of the Hugging Face Hub.

    tfla = kernels.get_kernel("OWNER/tfla", version=1)
    h = tfla.mlstm(q, k, v, i, f)

Everything that `import tfla` has is here, and after this `import tfla` finds the same package.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).parent / "tfla"


def _load() -> ModuleType:
    """The package beside this file, under its own name: its operators are torch.ops.tfla, which a process has once."""
    spec = importlib.util.spec_from_file_location(
        "tfla", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    assert spec is not None and spec.loader is not None
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)  # imports nothing else
    there = sys.modules.get("tfla")
    if there is None:
        sys.modules["tfla"] = mine
        return mine
    if there.__version__ != mine.__version__:
        raise ImportError(
            f"tfla: this process has loaded tfla {there.__version__}; the kernel, which is {mine.__version__}, "
            "cannot be loaded beside it"
        )
    return there


_tfla = _load()
__version__ = _tfla.__version__
__all__ = [*_tfla.__all__]


def __getattr__(name: str) -> Any:
    return getattr(_tfla, name)


def __dir__() -> list[str]:
    return dir(_tfla)
