"""The products of a decoding step alone, few rows: one Triton kernel (`tfla.lm.models.kernels`) beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.markdown import table
from tfla.lm import ModelConfig
from tfla.lm.models import kernels
from tfla.lm.models.decoding import normalized

COPIES = 8  # of a weight, in turn: none of them stays in the GPU's cache


def microseconds(call: Callable[[Tensor], Any], weights: list[Tensor]) -> float:
    """Of one call, by a CUDA graph of one for every weight."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(weights))
    return sorted(times)[len(times) // 2]


def row(name: str, rows: int, n: int, k: int) -> list[str]:
    """name: what belongs to the product, as `kernels.product` takes it."""
    device: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(n, k, **device) for _ in range(COPIES)]
    x, norm, into = torch.randn(rows, k, **device), torch.randn(k, **device), torch.randn(rows, n, **device)

    def ours(weight: Tensor) -> Any:
        if name == "into":
            return kernels.product(x, weight, into=into)
        return kernels.product(x, weight, norm=(norm, 1e-6), swiglu=name == "swiglu")

    def theirs(weight: Tensor) -> Any:
        if name == "into":
            return into.addmm_(x, weight.t())
        y = F.linear(normalized(x, norm, 1e-6), weight)
        return kernels.swiglu(y) if name == "swiglu" else y

    took = microseconds(ours, weights), microseconds(theirs, weights)
    speeds = [f"{t:.1f} us, {weights[0].nbytes / t / 1e6:.2f} TB/s" for t in took]
    return [f"{n} x {k}, {name}, {rows} rows", *speeds]


def report(config: ModelConfig) -> str:
    dim, hidden, values = config.dim, config.feed_forward, round(config.v_factor * config.dim)
    inputs = 2 * round(config.qk_factor * dim) + 2 * values + 2 * config.heads
    shapes = [
        ("norm", inputs, dim), ("into", dim, values), ("swiglu", 2 * hidden, dim), ("into", dim, hidden),
        ("norm", config.vocab, dim),
    ]  # fmt: skip
    rows = [row(name, count, n, k) for count in (1, 8, 16) for name, n, k in shapes]
    return table(["product", "one kernel", "PyTorch"], rows)
