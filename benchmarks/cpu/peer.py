"""Times the published mlstm_kernels (native PyTorch kernels) on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median

import torch
from mlstm_kernels.torch import get_mlstm_kernel, get_mlstm_step_kernel

KERNELS = ("chunkwise--native_autograd", "chunkwise--native_custbw")
CHUNKS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Shape:
    """One dense batch; q, k are [batch, heads, tokens, dqk], v is [batch, heads, tokens, dhv]."""

    batch: int
    tokens: int
    heads: int
    dqk: int
    dhv: int


@dataclass(frozen=True)
class Setting:
    """What can be chosen about the peer."""

    kernel: str
    chunk: int

    def __str__(self) -> str:
        return f"{self.kernel.removeprefix('chunkwise--')}, chunk {self.chunk}"


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "mlstm_kernels": version("mlstm_kernels")}


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def inputs(shape: Shape) -> list[torch.Tensor]:
    """q, k, v, i, f with the gates that `tfla bench` draws: i from N(-4, 1), f from N(4.5, 1)."""
    torch.manual_seed(1)
    rows = (shape.batch, shape.heads, shape.tokens)
    return [
        torch.randn(*rows, shape.dqk),
        torch.randn(*rows, shape.dqk),
        torch.randn(*rows, shape.dhv),
        torch.randn(*rows) - 4,
        torch.randn(*rows) + 4.5,
    ]


def samples_of(call: Callable[[], None], min_time: float) -> list[float]:
    """Seconds per call, in samples of at least 5 ms after a warm-up: the way `tfla bench` measures."""
    call()
    begin = time.perf_counter()
    call()
    calls = max(1, math.ceil(5e-3 / (time.perf_counter() - begin)))
    samples: list[float] = []
    spent = 0.0
    while spent < min_time or len(samples) < 3:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - begin
        samples.append(elapsed / calls)
        spent += elapsed
    return samples


def forward_call(shape: Shape, setting: Setting) -> Callable[[], None]:
    kernel = get_mlstm_kernel(setting.kernel)
    tensors = inputs(shape)

    def call() -> None:
        with torch.no_grad():
            kernel(*tensors, chunk_size=setting.chunk)

    return call


def training_call(shape: Shape, setting: Setting) -> Callable[[], None]:
    kernel = get_mlstm_kernel(setting.kernel)
    tensors = [tensor.requires_grad_() for tensor in inputs(shape)]
    gradient = torch.randn_like(tensors[2])

    def call() -> None:
        for tensor in tensors:
            tensor.grad = None
        kernel(*tensors, chunk_size=setting.chunk).backward(gradient)

    return call


def step_call(shape: Shape) -> Callable[[], None]:
    """One token per sequence, fed its own state again: the decoding loop."""
    kernel = get_mlstm_step_kernel("native")
    q, k, v, i, f = (tensor.select(2, 0) for tensor in inputs(shape))
    i, f = i.unsqueeze(-1), f.unsqueeze(-1)
    state = (
        torch.randn(shape.batch, shape.heads, shape.dqk, shape.dhv),
        torch.randn(shape.batch, shape.heads, shape.dqk),
        torch.zeros(shape.batch, shape.heads, 1),
    )

    def call() -> None:
        nonlocal state
        with torch.no_grad():
            _, state = kernel(q, k, v, i, f, *state)

    return call


def sequence_call(operation: str, shape: Shape, setting: Setting) -> Callable[[], None]:
    return (forward_call if operation == "forward" else training_call)(shape, setting)


def sequence_seconds(operation: str, shape: Shape, setting: Setting, min_time: float) -> float:
    return median(samples_of(sequence_call(operation, shape, setting), min_time))


def step_seconds(shape: Shape, min_time: float) -> float:
    return median(samples_of(step_call(shape), min_time))


def settings(shape: Shape) -> list[Setting]:
    """The kernels need a chunk that divides the sequence."""
    return [Setting(kernel, chunk) for kernel in KERNELS for chunk in CHUNKS if shape.tokens % chunk == 0]


def best_setting(operation: str, shape: Shape, min_time: float) -> Setting:
    """The kernel and chunk size that are fastest here, by their best sample of two passes: whatever disturbs the
    machine for a moment must not make the peer look slower than it is."""
    fastest: dict[Setting, float] = {}
    for setting in settings(shape) * 2:
        seconds = min(samples_of(sequence_call(operation, shape, setting), min_time))
        fastest[setting] = min(seconds, fastest.get(setting, math.inf))
    return min(fastest, key=lambda setting: fastest[setting])
