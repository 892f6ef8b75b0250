"""Out of memory, as torch says it."""

from __future__ import annotations

import torch


def torch_error(error: RuntimeError) -> RuntimeError:
    """An error of an operator, or where torch had no GPU memory to give, the exception that torch raises for that. The
    operators are compiled against torch's stable ABI, through which its text comes, but not its type."""
    text = str(error)
    if type(error) is RuntimeError and "out of memory" in text and not text.startswith("tfla:"):
        return torch.OutOfMemoryError(text)
    return error
