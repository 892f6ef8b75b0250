"""The published GPU kernels, each as a call to be timed: mlstm_kernels and flash-linear-attention, both Triton, and
cuDNN's attention as PyTorch calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch._dynamo

from benchmarks.gpu import parts as gpu_parts
from benchmarks.paper.model import Workload

# mlstm_kernels compiles its gates by torch.compile, which would give up after a few shapes and run them uncompiled.
torch._dynamo.config.recompile_limit = 64

CHUNK = 128  # the paper's choice for its xl_chunk kernels
REST = 0.6  # seconds, as `tfla bench` rests before its burst
BURST_CALLS, FEWEST_CALLS = 12, 3
GRAPH_CALLS = 20  # of a step: a call is too short to be timed alone
MOST_BURST = 0.25  # seconds: slow calls are repeated less often

Operator = Callable[..., torch.Tensor]  # of q, k, v, i, f


def timed(call: Callable[[], object]) -> float:
    """Seconds on the GPU, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def warm_up(call: Callable[[], object]) -> float:
    """The second of two calls: the first one compiles."""
    timed(call)
    return timed(call)


def sustained_seconds(call: Callable[[], object], min_time: float) -> float:
    """Median time of a call among many, one right after the other."""
    times: list[float] = []
    while sum(times) < min_time or len(times) < FEWEST_CALLS:
        times.append(timed(call))
    return median(times)


def burst_seconds(call: Callable[[], object], once: float) -> float:
    """Median of a dozen calls (fewer of slow ones) after a rest, as `tfla bench` takes it: before the GPU lowers its
    clock."""
    calls = min(max(int(MOST_BURST / once), FEWEST_CALLS), BURST_CALLS)
    torch.cuda.synchronize()
    time.sleep(REST)
    return median(timed(call) for _ in range(calls))


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """GRAPH_CALLS calls, one after the other, in a CUDA graph: what replays them."""
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    replay: Callable[[], None] = graph.replay
    return replay


@dataclass(frozen=True)
class Peer:
    heads_first: bool  # (B,H,T,D) rather than (B,T,H,D)
    operator: Operator
    note: str = ""  # what has to be known about its training

    def calls(self, workload: Workload) -> dict[str, Callable[[], object]]:
        """forward and training, on inputs that stay."""
        rows = (workload.tokens, workload.heads)
        sizes = (workload.batch, *(reversed(rows) if self.heads_first else rows))

        def tensor(*width: int, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return (torch.randn(*sizes, *width, device="cuda") + mean).to(dtype).requires_grad_()

        gate = torch.float32
        inputs = [tensor(workload.dqk), tensor(workload.dqk), tensor(workload.dhv)]
        inputs += [tensor(mean=-4, dtype=gate), tensor(mean=4.5, dtype=gate)]
        dh = tensor(workload.dhv).detach()

        def forward() -> None:
            with torch.no_grad():
                self.operator(*inputs)

        def training() -> None:
            for x in inputs:
                x.grad = None
            self.operator(*inputs).backward(dh)

        return {"forward": forward, "training": training}

    def warm(self, workload: Workload, operations: list[str]) -> Iterator[dict[str, Any]]:
        """Every kernel compiled and run once."""
        calls = self.calls(workload)
        for operation in operations:
            calls[operation]()
            torch.cuda.synchronize()
            yield {operation: 0.0}

    def time(self, workload: Workload, operations: list[str], min_time: float) -> Iterator[dict[str, Any]]:
        """One dictionary after each operation, so that what fails later costs nothing. min_time 0: burst alone."""
        calls = self.calls(workload)
        for operation in operations:
            once = warm_up(calls[operation])
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            row: dict[str, Any] = {operation: burst_seconds(calls[operation], once)}
            if min_time > 0:
                row[f"{operation}_sustained"] = sustained_seconds(calls[operation], min_time)
            if operation == "training":
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
                if self.note:
                    row["training_note"] = self.note
            yield row


def exponential() -> Peer:
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

    def operator(*inputs: torch.Tensor) -> torch.Tensor:
        return mlstm_chunkwise__xl_chunk(*inputs, chunk_size=CHUNK, autocast_kernel_dtype=torch.bfloat16)

    return Peer(True, operator)


def sigmoid() -> Peer:
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk

    def operator(*inputs: torch.Tensor) -> torch.Tensor:
        return mlstm_siging_chunkwise__xl_chunk(
            *inputs, normalize=False, chunk_size=CHUNK, autocast_kernel_dtype=torch.bfloat16
        )

    return Peer(True, operator)


def simple_gla() -> Peer:
    from fla.ops.common import chunk_o
    from fla.ops.simple_gla import chunk_simple_gla

    def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _i: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        return chunk_simple_gla(q, k, v, torch.nn.functional.logsigmoid(f))[0]

    # FLA refuses to train there, since Triton compiles one of its kernels wrongly. How long it takes can still be told.
    if chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1:
        chunk_o.TRITON_ABOVE_3_7_1 = True
        return Peer(
            False,
            operator,
            "FLA refuses to train with this Triton, which makes its gradients wrong; timed all the same",
        )
    return Peer(False, operator)


def attention() -> Peer:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _i: torch.Tensor, _f: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return Peer(True, operator)


PEERS: dict[str, Callable[[], Peer]] = {
    **dict(zip(gpu_parts.TRITON_PEERS, (exponential, sigmoid, simple_gla), strict=True)),
    gpu_parts.ATTENTION: attention,
}


def step_seconds(batch: int, min_time: float, heads: int = 8, dqk: int = 256, dhv: int = 512) -> float:
    """mlstm_kernels' step, captured in a CUDA graph."""
    from mlstm_kernels.torch import get_mlstm_step_kernel

    step = get_mlstm_step_kernel("triton")

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(batch, heads, *shape, device="cuda", dtype=dtype)

    bf16 = torch.bfloat16
    tokens = [tensor(dqk, dtype=bf16), tensor(dqk, dtype=bf16), tensor(dhv, dtype=bf16), tensor(1), tensor(1)]
    state = [tensor(dqk, dhv), tensor(dqk), tensor(1)]
    replay = captured(lambda: step(*tokens, *state))
    warm_up(replay)
    return sustained_seconds(replay, min_time) / GRAPH_CALLS
