"""The causal convolution of a few tokens, channel by channel, that layers of the delta rule have before q, k and v."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tfla


class Places(NamedTuple):
    """Where tokens are in their sequences, so that none looks into the one before."""

    position: Tensor  # (B,T), from 0
    sequence: Tensor | None = None  # (T), with packed sequences
    ends: Tensor | None = None  # (N), of packed sequences: one behind the last token
    lengths: Tensor | None = None  # (N), of packed sequences
    cu_seqlens: Tensor | None = None  # of packed sequences, as they came
    documents: Tensor | None = None  # (B,T), of documents: their numbers


def packed_places(cu_seqlens: Tensor, tokens: int) -> Places:
    """Tokens behind the last sequence count on as part of it; empty sequences have none."""
    if cu_seqlens.dim() != 1:  # the operator, which checks all else, comes later
        raise ValueError(f"tfla: cu_seqlens has {cu_seqlens.dim()} axes; it must have one, (N+1)")
    bounds = cu_seqlens.long()
    token = torch.arange(tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), token, right=True).clamp(max=bounds.shape[0] - 2)
    position = (token - bounds[sequence])[None]
    return Places(position, sequence, bounds[1:], bounds[1:] - bounds[:-1], cu_seqlens)


def document_starts(seq_idx: Tensor) -> Tensor:
    """(B,T) bool, as `document_places` takes it: where the number is another than that of the token before."""
    changes = seq_idx[:, 1:] != seq_idx[:, :-1]
    return F.pad(changes, (1, 0), value=True)[:, : seq_idx.shape[1]]  # of no tokens there are none


def document_places(starts: Tensor) -> Places:
    """starts (B,T) bool: the first tokens of documents."""
    token = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    position = token - torch.where(starts, token, 0).cummax(1).values
    return Places(position, documents=starts.cumsum(1))


def has_kernels(x: Tensor, width: int) -> bool:
    """Whether `tfla.causal_conv1d` takes this; all else is computed by PyTorch."""
    return x.device.type == "cpu" and width <= 32


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, before: Tensor | None = None, places: Places | None = None
) -> Tensor:
    """y_t = silu(sum_j weight_j x_{t-W+1+j} + bias): x (B,T,channels) to the same, weight (channels,1,W).

    before (N,W-1,channels): the inputs before each sequence, of which documents see none; zeros where it is None.
    """
    if not has_kernels(x, weight.shape[2]):
        return _by_torch(x, weight, bias, before, places)
    where: dict[str, Any] = {"initial_state": before}
    if places is not None:
        where = {"cu_seqlens": places.cu_seqlens, "seq_idx": places.documents}
        where["initial_state"] = before if places.documents is None else None
    return tfla.causal_conv1d(x, weight.squeeze(1), bias, activation="silu", **where)


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, places: Places | None) -> Tensor:
    # Shifted products rather than conv1d: they take any dtype, and sequences in one row are kept apart by a mask.
    weight, tokens = weight.squeeze(1).to(x.dtype), x.shape[1]
    size = weight.shape[1] - 1
    packed = places is not None and places.sequence is not None
    padded = _joined(x, None if packed else before, size)
    y = x * weight[:, -1]
    for shift in range(1, size + 1):
        earlier = padded[:, size - shift : size - shift + tokens]
        if places is not None:
            earlier = _own(earlier, shift, before if packed else None, places)
        y = y + earlier * weight[:, -1 - shift]
    return F.silu(y if bias is None else y + bias.to(x.dtype))


def _own(earlier: Tensor, shift: int, before: Tensor | None, places: Places) -> Tensor:
    """With what lies `shift` tokens before the first ones of a sequence taken from its own past."""
    inside = (places.position >= shift).unsqueeze(-1)
    if before is None:
        return torch.where(inside, earlier, 0)
    size = before.shape[1]
    index = (size - shift + places.position[0]).clamp(max=size - 1)
    return torch.where(inside, earlier, before.to(earlier.dtype)[places.sequence, index])


class ShortConvolution(nn.Conv1d):
    """The parameters of `short_convolution`: (B,T,channels) to the same; zeros before a sequence."""

    def __init__(self, channels: int, size: int, bias: bool = False, **factory: Any) -> None:
        super().__init__(channels, channels, size, groups=channels, bias=bias, **factory)

    @property
    def before(self) -> int:
        """Tokens before a sequence that its first one looks at: (N,W-1,channels) of a state."""
        return self.kernel_size[0] - 1

    def forward(self, x: Tensor, before: Tensor | None = None, places: Places | None = None) -> Tensor:
        """before (N,W-1,channels): the inputs before each sequence; documents see none."""
        return short_convolution(x, self.weight, self.bias, before, places)

    def step(self, x: Tensor, state: Tensor, slots: Tensor | None = None) -> Tensor:
        """Of new tokens; state (S,W-1,channels), or its rows `slots`, takes their inputs in place."""
        if has_kernels(x, self.before + 1):
            weight = self.weight.squeeze(1)
            return tfla.causal_conv1d_step(x, state, weight, self.bias, activation="silu", slots=slots)
        before = state if slots is None else state[slots.long()]
        y, new = _by_torch(x, self.weight, self.bias, before, None), self.last(x, before)
        if slots is None:
            state.copy_(new)
        else:  # rows with slot -1 are padding
            state[slots[slots >= 0].long()] = new[slots >= 0].to(state.dtype)
        return y

    def last(self, x: Tensor, before: Tensor | None = None, places: Places | None = None) -> Tensor:
        """What the tokens after x need as `before`: the last W-1 inputs of each sequence."""
        if places is None:
            return _joined(x, before, self.before)[:, x.shape[1] :]
        assert places.ends is not None and places.lengths is not None
        place = torch.arange(self.before, device=x.device)
        rows = places.ends[:, None] - self.before + place
        inside = (self.before - place <= places.lengths[:, None]).unsqueeze(-1)
        found = F.pad(x[0], (0, 0, 0, 1))[rows.clamp(min=0)]  # a row more, for no tokens at all
        if before is None:
            return torch.where(inside, found, 0)
        index = (place + places.lengths[:, None]).clamp(max=max(self.before - 1, 0))
        earlier = before.to(x.dtype).gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
        return torch.where(inside, found, earlier)


def _joined(x: Tensor, before: Tensor | None, size: int) -> Tensor:
    if before is None:
        return F.pad(x, (0, 0, size, 0))
    return torch.cat([before.to(x.dtype), x], dim=1)
