"""Triton kernels of a decoder's step in bfloat16: what PyTorch does in several passes, in one. Nothing depends on them.

At a few rows a step consists of small kernels as much as of weights: norms, gates and sums are therefore parts of the
products that read or write them.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:  # as on a CPU
    triton = None

ROWS = 16  # the most rows that `product` takes: one tile of the tensor cores

if triton is not None:

    @triton.jit
    def _product(
        x, norm, weight, y, rows, eps, n: tl.constexpr, k: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """A block of columns of y = norm(x) weight^T; weights are read once, whatever the number of rows."""
        row, column = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_M,), tl.float32)
        here = column.to(tl.int64)[None, :] * k
        for begin in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            inner = begin + tl.arange(0, BLOCK_K)
            inside = inner < k
            a = tl.load(x + row[:, None] * k + inner[None, :], (row < rows)[:, None] & inside[None, :], 0.0)
            known = (column < n)[None, :] & inside[:, None]
            b = tl.load(weight + here + inner[:, None], known, 0.0)
            if NORM:
                # 1 / rms is a factor of the whole row, so it is multiplied at the end and x is read once.
                wide = a.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                a = (wide * tl.load(norm + inner, inside, 0.0).to(tl.float32)[None, :]).to(a.dtype)
            acc = tl.dot(a, b, acc)
            if SWIGLU:
                up = tl.dot(a, tl.load(weight + here + n * k + inner[:, None], known, 0.0), up)
        if NORM:
            scale = tl.rsqrt(squares / k + eps)[:, None]
            acc *= scale
            up *= scale
        if SWIGLU:
            acc = acc * tl.sigmoid(acc) * up
        place = y + row[:, None] * n + column[None, :]
        valid = (row < rows)[:, None] & (column < n)[None, :]
        if ADD:
            acc += tl.load(place, valid, 0.0).to(tl.float32)
        tl.store(place, acc.to(y.dtype.element_ty), valid)

    @triton.jit
    def _swiglu(pair, y, n, BLOCK: tl.constexpr):
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(pair + 2 * row * n + column, column < n, 0.0).to(tl.float32)
        up = tl.load(pair + (2 * row + 1) * n + column, column < n, 0.0).to(tl.float32)
        tl.store(y + row * n + column, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), column < n)

    @triton.jit
    def _gated_norm(
        h, o, weight, y, o_stride, size, eps, HEADS: tl.constexpr, CENTRE: tl.constexpr, BLOCK: tl.constexpr
    ):
        """sigmoid(o) * norm(h) * weight, a head of a row per program."""
        row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
        column = tl.arange(0, BLOCK)
        inside = column < size
        place = row * HEADS * size + head * size + column
        x = tl.load(h + place, inside, 0.0).to(tl.float32)
        if CENTRE:
            x = tl.where(inside, x - tl.sum(x) / size, 0.0)
        x *= tl.rsqrt(tl.sum(x * x) / size + eps)
        gate = tl.load(o + row * o_stride + head * size + column, inside, 0.0).to(tl.float32)
        w = tl.load(weight + head * size + column, inside, 0.0).to(tl.float32)
        tl.store(y + place, (tl.sigmoid(gate) * x * w).to(y.dtype.element_ty), inside)


def usable(x: Tensor) -> bool:
    """Not for float16: its range need not hold what `product` makes of a row before it is divided by its rms."""
    return triton is not None and x.is_cuda and x.dtype == torch.bfloat16 and _compiles(x.device)


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Triton may be there without what it needs, such as a C compiler, or not know this GPU."""
    try:
        swiglu(torch.zeros(1, 2, device=device, dtype=torch.bfloat16))
    except Exception:
        return False
    return True


def few(x: Tensor) -> bool:
    """Whether `product` is for this many rows; more of them are a matrix product of the library."""
    return usable(x) and x.shape[0] <= ROWS


def product(
    x: Tensor, weight: Tensor, *, norm: tuple[Tensor, float] | None = None, swiglu: bool = False,
    into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x (rows,k) times weight (n,k), after a norm (weight, eps); with swiglu weight is that of gate and up (2n,k);
    added to `into`."""
    rows, k = x.shape
    n = weight.shape[0] // (2 if swiglu else 1)
    y = x.new_empty(rows, n) if into is None else into
    # Blocks in flight cover the memory's latency: with few columns there are few programs, and each has longer ones.
    block_k = 512 if n <= 4096 else 256
    options: dict[str, Any] = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": block_k, "STAGES": 4, "num_warps": 4}
    given, eps = norm if norm is not None else (x, 0.0)
    _product[(triton.cdiv(n, 16),)](
        x, given, weight, y, rows, eps, n=n, k=k, NORM=norm is not None, SWIGLU=swiglu, ADD=into is not None, **options
    )  # fmt: skip
    return y


def swiglu(pair: Tensor) -> Tensor:
    """silu(gate) * up for gate and up beside each other, (rows,2n)."""
    rows, n = pair.shape[0], pair.shape[1] // 2
    y = pair.new_empty(rows, n)
    _swiglu[(rows, triton.cdiv(n, 1024))](pair, y, n, BLOCK=1024)
    return y


def gated_norm(h: Tensor, o: Tensor, weight: Tensor, eps: float, centre: bool) -> Tensor:
    """sigmoid(o) * norm(h) * weight: h (rows,heads,size), o (rows,heads*size) of any stride between rows."""
    rows, heads, size = h.shape
    y = h.new_empty(rows, heads * size)
    block = triton.next_power_of_2(size)
    _gated_norm[(rows * heads,)](
        h.contiguous(), o, weight, y, o.stride(0), size, eps, HEADS=heads, CENTRE=centre, BLOCK=block
    )
    return y
