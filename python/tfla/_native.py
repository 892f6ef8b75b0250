"""Where the compiled libraries of this package are."""

from __future__ import annotations

from pathlib import Path


def library(name: str) -> str:
    """The path of a binding such as 'libtfla_torch.so'."""
    path = Path(__file__).parent / "lib" / name
    if not path.exists():
        raise ImportError(f"tfla: {path} is missing; this build of tfla was made without it")
    return str(path)
