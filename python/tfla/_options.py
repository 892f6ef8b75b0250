"""Names of options as the front ends spell them, and the numbers the C++ library knows them by."""

from __future__ import annotations

from typing import Literal

Gate = Literal["exp", "sigmoid", "log"]
Normalizer = Literal["max", "none"]
Layout = Literal["bthd", "bhtd"]

GATES = {"exp": 0, "sigmoid": 1, "log": 2}
NORMALIZERS = {None: 0, "none": 1, "max": 2}
HEAD_FIRST = {"bthd": False, "bhtd": True}
CHUNKWISE, PARALLEL, RECURRENT = 0, 1, 2
# Of the registered operators, in their order: gate, normalizer, head_first, eps, qk_scale, soft_cap; and for sequences
# exact_normalizer_grad, chunk_size, formulation.
DEFAULTS = (0, 0, False, 1e-6, None, None, False, 0, CHUNKWISE)


def unknown(name: str, value: object, accepted: tuple[object, ...]) -> ValueError:
    """The error for an option that is not among its accepted values."""
    words = [repr(word) for word in accepted]
    return ValueError(f"tfla: {name} is {value!r}; it must be {', '.join(words[:-1])} or {words[-1]}")


def spacing(chunk_size: int | None) -> int:
    """The chunk size as the library takes it: 0 lets the plan choose."""
    if chunk_size is not None and chunk_size <= 0:
        raise ValueError(f"tfla: chunk_size is {chunk_size}; it must be positive, or None to let the plan choose")
    return chunk_size or 0
