"""The state of a layer of the delta rule."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class DeltaState(NamedTuple):
    """What a layer keeps of N sequences: the operator's C, and the last inputs of the convolutions."""

    C: Tensor  # (N,H,dqk,dhv)
    q: Tensor  # (N,W-1,Hqk*dqk)
    k: Tensor  # (N,W-1,Hqk*dqk)
    v: Tensor  # (N,W-1,H*dhv)

    def rows(self, index: Any) -> DeltaState:
        """The states of some sequences, by a slice or a tensor of indices (a slice stays a view)."""
        return DeltaState(*(x[index] for x in self))

    def to(self, *args: Any, **kwargs: Any) -> DeltaState:
        return DeltaState(*(x.to(*args, **kwargs) for x in self))

    def detach(self) -> DeltaState:
        return DeltaState(*(x.detach() for x in self))

    def clone(self) -> DeltaState:
        return DeltaState(*(x.clone() for x in self))

    def copy_(self, other: DeltaState) -> DeltaState:
        """Overwrites this state in place, keeping its memory."""
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs)
        return self

    def reset_(self, index: Any = ...) -> DeltaState:
        """Sets the states of some sequences, or of all, back to the one before the first token, in place."""
        for x in self:
            x[index] = 0
        return self
