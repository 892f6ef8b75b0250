"""The state of a sequence, as PyTorch tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """The stabilised state of N sequences: the true C is C * exp(m), the true n is n * exp(m).

    float32, or float64 when q, k, v are. A named tuple: it unpacks, goes through torch.compile and torch.utils._pytree,
    and is saved with ``torch.save(state._asdict(), path)`` and loaded with ``State(**torch.load(path))``.
    """

    C: Tensor  # (N,H,dqk,dhv)
    n: Tensor  # (N,H,dqk)
    m: Tensor  # (N,H)

    @classmethod
    def zeros(
        cls,
        sequences: int,
        heads: int,
        dqk: int,
        dhv: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> State:
        """The state before the first token; also what a slot of a pool is set to for a new sequence."""
        shape = (sequences, heads, dqk, dhv)
        return cls(*(torch.zeros(shape[:axes], device=device, dtype=dtype) for axes in (4, 3, 2)))

    def rows(self, index: Any) -> State:
        """The states of some sequences: an index, a slice or a tensor of indices along N (a slice stays a view)."""
        if isinstance(index, int):
            index = slice(index, index + 1) if index != -1 else slice(-1, None)
        return State(*(x[index] for x in self))

    def to(self, *args: Any, **kwargs: Any) -> State:
        """As Tensor.to, for a device; float32 and float64 are the dtypes the operators take."""
        return State(*(x.to(*args, **kwargs) for x in self))

    def detach(self) -> State:
        return State(*(x.detach() for x in self))

    def clone(self) -> State:
        return State(*(x.clone() for x in self))

    def copy_(self, other: State) -> State:
        """Overwrites this state in place, keeping its memory (for CUDA graphs)."""
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs)
        return self

    def reset_(self, index: Any = ...) -> State:
        """Sets the states of some sequences, or of all, back to the one before the first token, in place."""
        for x in self:
            x[index] = 0
        return self
