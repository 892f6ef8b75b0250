"""Fake kernels: the shapes, dtypes and devices of what the operators return, for torch.compile."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from tfla import info
from tfla._options import CODES, DEFAULTS, OPTIONS, encode_all
from tfla._torch import operators  # noqa: F401  (defines what is registered for)

_SHORT_SEQUENCE = 64  # tokens; as choose_keep of src/plan/cuda_plan.cc has it
_DEFAULTS = encode_all(tuple(option.default for option in OPTIONS))


def on_one_device(*tensors: Tensor | None) -> None:
    devices = {x.device for x in tensors if x is not None}
    if len(devices) > 1:
        raise ValueError(f"tfla: tensors are on {', '.join(sorted(map(str, devices)))}; all must be on one device")


def _sequences(cu_seqlens: Tensor | None) -> int | None:
    """Packed into one row; None: a dense batch."""
    return None if cu_seqlens is None else cu_seqlens.shape[0] - 1


def state_shapes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, head_first: bool) -> list[tuple[int, ...]]:
    sequences = _sequences(cu_seqlens)
    shape = (v.shape[0] if sequences is None else sequences, v.shape[1 if head_first else 2], q.shape[3], v.shape[3])
    return [shape, shape[:3], shape[:2]]


def state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def gradient_of(x: Tensor | None, q: Tensor) -> Tensor:
    """That of an input that may be left out is empty."""
    return q.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape)


# Arguments at their defaults are left out at the end.
@torch.library.register_fake("tfla::mlstm")
@torch.library.register_fake("tfla::_mlstm")
def _(q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, *options):
    on_one_device(q, k, v, i, f, C, n, m, cu_seqlens)
    return v.new_empty(v.shape)


def _saved_bytes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: tuple) -> int:
    """What the plan calls saved_bytes; nothing on the CPU. In Python, since sizes may be symbols.

    Denominators are two vectors of a number per token and head, states C and n of all chunks; each of these begins on
    a boundary of its own. Whether states are kept and how long chunks are, the plan says, for any numbers where batch,
    tokens and heads are symbols. Head dimensions are taken as numbers.
    """
    named = dict(zip((option.name for option in OPTIONS), (*options, *_DEFAULTS[len(options) :]), strict=True))
    if not q.is_cuda or named["formulation"] == CODES.formulation["recurrent"]:
        return 0
    batch, tokens, heads = v.shape[0], v.shape[2 if named["layout"] else 1], v.shape[1 if named["layout"] else 2]
    boundary = info.scratch_alignment()
    real, stored, norm = {torch.float64: (8, 8, 8), torch.float32: (4, 4, 8)}.get(q.dtype, (4, 2, 4))

    def room(elements: int, item: int) -> int:
        return (elements * item + boundary - 1) // boundary * boundary

    denominators = 2 * room(batch * tokens * heads, real)
    if named["keep"] == CODES.keep[DEFAULTS.keep]:
        return denominators
    sequences = _sequences(cu_seqlens)
    # The plan keeps no states of packed sequences that are short on average.
    if sequences is not None and tokens < _SHORT_SEQUENCE * torch.sym_max(sequences, 1):
        return denominators
    chunk = _kept_chunk(q, v, batch, tokens, heads, sequences, named["chunk_size"])
    if chunk is None:
        return denominators
    if sequences is None:
        chunks = batch * torch.sym_max((tokens + chunk - 1) // chunk, 1)
    else:
        chunks = tokens // chunk + sequences
    dqk, dhv = q.shape[3], v.shape[3]
    padded_dhv = (dhv + 7) // 8 * 8
    return denominators + room(chunks * heads * dqk * padded_dhv, stored) + room(chunks * heads * dqk, norm)


def _kept_chunk(
    q: Tensor, v: Tensor, batch: int, tokens: int, heads: int, sequences: int | None, chunk_size: int
) -> int | None:
    """Tokens from one kept state to the next; None where no states are kept. Some kernels have shorter chunks where
    there are fewer tokens."""

    def number(size: int, typical: int) -> int:
        return size if isinstance(size, int) else typical

    def saved(tokens: int) -> info.Saved:
        dtype: Any = str(q.dtype).removeprefix("torch.")
        return info.saved(
            batch=number(batch, 1), tokens=tokens, heads=number(heads, 1), dqk=int(q.shape[3]), dhv=int(v.shape[3]),
            dtype=dtype, sequences=None if sequences is None else number(sequences, 1), chunk_size=chunk_size,
            keep="states",
        )  # fmt: skip

    with torch.cuda.device(q.device) if torch.cuda.is_available() else contextlib.nullcontext():
        usual, shortest = saved(number(tokens, 1 << 20)), saved(1)
    # Chunks that are too long for states to be kept may be cut short by the sequence: a graph for each of the two.
    if usual.keep != shortest.keep and tokens <= shortest.chunk:
        usual = shortest
    return torch.sym_max(shortest.chunk, torch.sym_min(usual.chunk, tokens)) if usual.keep == "states" else None


def _saved(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: tuple) -> Tensor:
    return v.new_empty(_saved_bytes(q, v, cu_seqlens, options), dtype=torch.uint8)


@torch.library.register_fake("tfla::mlstm_with_saved")
@torch.library.register_fake("tfla::_mlstm_with_saved")
def _(q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, *options):
    on_one_device(q, k, v, i, f, C, n, m, cu_seqlens)
    return v.new_empty(v.shape), _saved(q, v, cu_seqlens, options)


def _h_and_state(q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, gate=0, normalizer=0, head_first=False, *_):
    on_one_device(q, k, v, i, f, C, n, m, cu_seqlens)
    shapes = state_shapes(q, v, cu_seqlens, head_first)
    return (v.new_empty(v.shape), *(q.new_empty(shape, dtype=state_dtype(q)) for shape in shapes))


torch.library.register_fake("tfla::mlstm_with_state", _h_and_state)


@torch.library.register_fake("tfla::mlstm_with_state_and_saved")
def _(q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, *options):
    return (*_h_and_state(q, k, v, i, f, C, n, m, cu_seqlens, *options), _saved(q, v, cu_seqlens, options))


@torch.library.register_fake("tfla::mlstm_backward")
def _(dh, dC, dn, saved, q, k, v, i, f, C=None, n=None, m=None, cu_seqlens=None, *options):
    on_one_device(dh, dC, dn, saved, q, k, v, i, f, C, n, m, cu_seqlens)
    grads = [x.new_empty(x.shape) for x in (q, k, v, i, f)]
    return (*grads, gradient_of(C, q), gradient_of(n, q))


@torch.library.register_fake("tfla::_mlstm_backward")
def _(dh, saved, q, k, v, i, f):
    on_one_device(dh, saved, q, k, v, i, f)
    return tuple(x.new_empty(x.shape) for x in (q, k, v, i, f))


@torch.library.register_fake("tfla::mlstm_step")
@torch.library.register_fake("tfla::_mlstm_step")
def _(q, k, v, i, f, C, n, m, slots=None, *options):
    on_one_device(q, k, v, i, f, C, n, m, slots)
    return v.new_empty(v.shape)
