"""The state of a layer of Mamba-2."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Mamba2State(NamedTuple):
    """What a layer keeps of so many sequences: the operator's S, and the last inputs of the convolution."""

    S: Tensor  # (sequences,H,P,N)
    xBC: Tensor  # (sequences,W-1,H*P+2*G*N)

    def rows(self, index: Any) -> Mamba2State:
        """The states of some sequences, by a slice or a tensor of indices (a slice stays a view)."""
        return Mamba2State(*(x[index] for x in self))

    def to(self, *args: Any, **kwargs: Any) -> Mamba2State:
        """As Tensor.to; decoding takes states of any float dtype, of 16 bits too."""
        return Mamba2State(*(x.to(*args, **kwargs) for x in self))

    def detach(self) -> Mamba2State:
        return Mamba2State(*(x.detach() for x in self))

    def clone(self) -> Mamba2State:
        return Mamba2State(*(x.clone() for x in self))

    def copy_(self, other: Mamba2State) -> Mamba2State:
        """Overwrites this state in place, keeping its memory."""
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs)
        return self

    def reset_(self, index: Any = ...) -> Mamba2State:
        """Sets the states of some sequences, or of all, back to the one before the first token, in place."""
        for x in self:
            x[index] = 0
        return self
