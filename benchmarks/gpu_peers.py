"""The published GPU kernels, each as a call to be timed: mlstm_kernels and flash-linear-attention, both Triton."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from versions import versions

CHUNK = 128  # the paper's choice for its xl_chunk kernels


def about() -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "packages": versions("torch", "triton", "mlstm_kernels", "fla-core"),
    }


def timed(call: Callable[[], object]) -> float:
    """Seconds on the GPU, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def seconds(call: Callable[[], object], min_time: float) -> float:
    """Median time of a call among many, after a warm-up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while sum(times) < min_time or len(times) < 5:
        times.append(timed(call))
    return median(times)


def burst_seconds(call: Callable[[], object]) -> float:
    """Median of a dozen calls after a rest, as `tfla bench` takes it: before the GPU lowers its clock."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    time.sleep(0.6)
    return median(timed(call) for _ in range(12))


@dataclass(frozen=True)
class Peer:
    name: str
    heads_first: bool  # (B,H,T,D) rather than (B,T,H,D)
    call: Callable[..., torch.Tensor]  # of q, k, v, i, f

    def time(self, batch: int, tokens: int, heads: int, dqk: int, dhv: int, min_time: float) -> dict[str, float]:
        def tensor(width: int | None, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            shape = (batch, heads, tokens) if self.heads_first else (batch, tokens, heads)
            data = torch.randn(*shape, *(() if width is None else (width,)), device="cuda", dtype=torch.float32) + mean
            return data.to(dtype).requires_grad_()

        inputs = [
            tensor(dqk),
            tensor(dqk),
            tensor(dhv),
            tensor(None, -4, torch.float32),
            tensor(None, 4.5, torch.float32),
        ]
        dh = tensor(dhv).detach()

        def training() -> None:
            for x in inputs:
                x.grad = None
            self.call(*inputs).backward(dh)

        with torch.no_grad():
            result = {
                "forward": burst_seconds(lambda: self.call(*inputs)),
                "forward_sustained": seconds(lambda: self.call(*inputs), min_time),
            }
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            result["training"] = burst_seconds(training)
            result["training_sustained"] = seconds(training, min_time)
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
        except RuntimeError as reason:  # a kernel its compiler cannot build: reported, not hidden
            result["training_error"] = str(reason).splitlines()[0]  # type: ignore[assignment]
        torch.cuda.empty_cache()
        return result


def sequence_peers() -> list[Peer]:
    from fla.ops.simple_gla import chunk_simple_gla
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk

    def exponential(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, i: torch.Tensor, f: torch.Tensor
    ) -> torch.Tensor:
        return mlstm_chunkwise__xl_chunk(q, k, v, i, f, chunk_size=CHUNK, autocast_kernel_dtype=torch.bfloat16)

    def sigmoid(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, i: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        return mlstm_siging_chunkwise__xl_chunk(
            q, k, v, i, f, normalize=False, chunk_size=CHUNK, autocast_kernel_dtype=torch.bfloat16
        )

    def simple_gla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, i: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        return chunk_simple_gla(q, k, v, torch.nn.functional.logsigmoid(f))[0]

    return [
        Peer("mlstm_kernels mLSTMexp", True, exponential),
        Peer("mlstm_kernels mLSTMsig", True, sigmoid),
        Peer("FLA Simple GLA", False, simple_gla),
    ]


def time_step(batch: int, min_time: float, heads: int = 8, dqk: int = 256, dhv: int = 512) -> float:
    """mlstm_kernels' step, captured in a CUDA graph."""
    from mlstm_kernels.torch import get_mlstm_step_kernel

    step = get_mlstm_step_kernel("triton")

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(batch, heads, *shape, device="cuda", dtype=dtype)

    bf16 = torch.bfloat16
    tokens = [tensor(dqk, dtype=bf16), tensor(dqk, dtype=bf16), tensor(dhv, dtype=bf16), tensor(1), tensor(1)]
    state = [tensor(dqk, dhv), tensor(dqk), tensor(1)]
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            step(*tokens, *state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = 20
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(calls):
            step(*tokens, *state)
    return seconds(graph.replay, min_time) / calls
