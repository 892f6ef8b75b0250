"""Time of a training step: tfla's xLSTM, the published xlstm package, and the Transformer, one after the other.

A step is forward, loss, backward, clipping and AdamW, on rows of random tokens, with float32 master weights. All
subjects share loss, clipping and optimizer. The published package runs as it is, and once more with its blocks under
torch.compile, as ours are.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla._options import unknown
from tfla.lm.checks import check_positive, out_of_memory
from tfla.lm.config import ModelConfig, Recipe, preset, recipe
from tfla.lm.model import LanguageModel
from tfla.lm.training.loss import cross_entropy
from tfla.lm.training.metrics import flops_per_token, peak_flops
from tfla.lm.training.optimizer import make_optimizer
from tfla.lm.training.parallel import World, spread

SUBJECTS = ("exp", "sigmoid", "xlstm", "xlstm-compiled", "transformer")
PUBLISHED = ("xlstm", "xlstm-compiled")  # as the package runs, and with its blocks under torch.compile
XLSTM_KERNELS = {
    "cuda": ("chunkwise--triton_xl_chunk", "native_sequence__triton", "triton"),
    "cpu": ("chunkwise--native_autograd", "native_sequence__native", "native"),
}
# Kernels of the sequence layer, by their names in a profile.
KERNELS = {
    "exp": r"tfla::",
    "sigmoid": r"tfla::",
    "xlstm": r"mlstm",
    "xlstm-compiled": r"mlstm",
    "transformer": r"flash|fmha|sdpa|scaled_dot_product|attention|cudnn.*attn",
}


@dataclass(frozen=True)
class Options:
    size: str
    context: int = 8192
    batch: int = 8
    steps: int = 5
    compile: bool = True
    fuse: bool = False
    checkpoint_activations: bool = False
    device: str = "cuda"
    vocab: int | None = None  # None: the preset's
    layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("context", "batch", "steps"):
            check_positive(name, getattr(self, name))
        for name in ("vocab", "layers"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), ", or None for the preset's")
        if self.device not in XLSTM_KERNELS:
            raise unknown("device", self.device, tuple(XLSTM_KERNELS))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


class Published(nn.Module):
    """xlstm's own model and kernels, with the loss all subjects share. Its master weights are float32 by autocast."""

    def __init__(self, config: ModelConfig, options: Options, compiled: bool) -> None:
        super().__init__()
        package: Any = importlib.import_module("xlstm.xlstm_large.model")
        chunkwise, sequence, step = XLSTM_KERNELS[options.device]
        # It returns its states, as its own layer takes for granted; 128 is the paper's chunk size for this kernel.
        self.model = package.xLSTMLarge(
            package.xLSTMLargeConfig(
                embedding_dim=config.dim,
                num_heads=config.heads,
                num_blocks=config.layers,
                vocab_size=config.vocab,
                mode="train",
                return_last_states=True,
                chunkwise_kernel=chunkwise,
                sequence_kernel=sequence,
                step_kernel=step,
                chunk_size=128,
                weight_mode="fused" if config.fuse else "single",
            )  # fmt: skip
        )
        self.options = options
        self.cap = config.logit_soft_cap
        if compiled:
            for block in self.model.backbone.blocks:
                block.compile()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.options.device, dtype=self.options.dtype, enabled=self.options.dtype != torch.float32):
            x, _ = self.model.backbone(self.model.embedding(tokens))
        x = x.flatten(0, 1).to(self.options.dtype)
        compiled = self.options.compile and self.options.device == "cuda"
        return cross_entropy(x, self.model.lm_head.weight, targets.flatten(), self.cap, compiled=compiled)


class Ours(nn.Module):
    def __init__(self, config: ModelConfig, options: Options, training: Recipe) -> None:
        super().__init__()
        model = LanguageModel(config, options.dtype)
        self.model = spread(model, training, World(device=torch.device(options.device)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets).total


def model_config(subject: str, options: Options) -> ModelConfig:
    changes: dict[str, Any] = {"fuse": options.fuse}
    if options.vocab is not None:
        changes["vocab"] = options.vocab
    if options.layers is not None:
        changes["layers"] = options.layers
    if subject == "transformer":
        return preset(options.size, kind="transformer", **changes)
    if subject not in SUBJECTS:
        raise unknown("models", subject, SUBJECTS)
    return preset(options.size, gate="sigmoid" if subject == "sigmoid" else "exp", **changes)


def check(subjects: tuple[str, ...], choices: list[Options]) -> None:
    """What is unknown is refused before the first subject is measured, not when its turn comes."""
    if not choices:
        raise ValueError("tfla: sizes is empty; it must name presets, such as 160m")
    for options in choices:
        for subject in subjects:
            model_config(subject, options)


def missing(subject: str, device: str) -> str | None:
    """Why a subject cannot be measured here."""
    if subject not in PUBLISHED:
        return None
    try:
        importlib.import_module("xlstm.xlstm_large.model")
        if device == "cuda":
            importlib.import_module("triton")
    except ImportError as error:
        return f"not installed: {error}"
    return None


def fastest_attention(config: ModelConfig, options: Options) -> tuple[str, Any]:
    """PyTorch's attention backend with the shortest forward and backward at this shape."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if options.device != "cuda":
        return "default", contextlib.nullcontext
    shape = (options.batch, config.heads, options.context, config.dim // config.heads)
    q, k, v = (torch.randn(shape, device="cuda", dtype=options.dtype, requires_grad=True) for _ in range(3))
    times = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def call(backend: Any = backend) -> None:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        try:
            times[backend] = median_seconds(call, 3, "cuda")
        except RuntimeError:  # not available for this shape or GPU
            continue
    best = min(times, key=lambda backend: times[backend])
    return best.name, lambda: sdpa_kernel(best)


def median_seconds(call: Callable[[], object], repetitions: int, device: str, warmup: int = 2) -> float:
    times = []
    for repetition in range(warmup + repetitions):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) * 1e-3
        else:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        if repetition >= warmup:
            times.append(seconds)
    return sorted(times)[len(times) // 2]


def kernel_seconds(call: Callable[[], object], pattern: str, device: str) -> tuple[float, list[tuple[str, float]]]:
    """Device time of kernels that match the pattern in one call, and the ten longest kernels, by torch's profiler.

    A kernel that is launched before the one before it is done, as tfla's are, counts from then on: an upper bound.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    rows = [
        (row.key, (row.self_device_time_total if device == "cuda" else row.self_cpu_time_total) * 1e-6)
        for row in profiler.key_averages()
        if row.device_type == wanted
    ]
    matching = sum(seconds for name, seconds in rows if re.search(pattern, name, re.IGNORECASE))
    return matching, sorted(rows, key=lambda row: -row[1])[:10]


def measure(subject: str, options: Options) -> dict[str, Any]:
    """One subject's row of the table."""
    torch.manual_seed(0)
    config = model_config(subject, options)
    training = recipe(
        options.size, lr=1e-4, batch=options.batch, steps=10_000, context=options.context, warmup=0, cooldown=0,
        compile=options.compile, checkpoint_activations=options.checkpoint_activations,
    )  # fmt: skip
    attention, context = (
        fastest_attention(config, options) if subject == "transformer" else (None, contextlib.nullcontext)
    )
    with torch.device(options.device):
        if subject in PUBLISHED:
            module: nn.Module = Published(config, options, options.compile and subject == "xlstm-compiled")
        else:
            module = Ours(config, options, training)
    optimizer = make_optimizer(module, training)
    tokens = torch.randint(0, config.vocab, (options.batch, options.context + 1), device=options.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    count = inputs.numel()
    losses = []

    def step() -> None:
        loss = module(inputs, targets) / count
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with context():
        seconds = median_seconds(step, options.steps, options.device)
        kernels, longest = kernel_seconds(step, KERNELS[subject], options.device)
    peak = peak_flops(torch.device(options.device))
    rate = count / seconds
    mfu = None if peak is None else rate * flops_per_token(config, options.context) / peak
    return {
        "model": subject, "size": options.size, "heads": config.heads, "milliseconds": 1e3 * seconds,
        "tokens_per_second": rate, "mfu": mfu,
        "kernel_milliseconds": 1e3 * kernels, "kernel_share": kernels / seconds, "loss": losses[-1].item(),
        "attention": attention, "longest_kernels": [[name[:120], 1e3 * value] for name, value in longest],
        "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else None,
    }  # fmt: skip


def release() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(subjects: tuple[str, ...], options: Options, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All subjects at one size and one batch: where one of them runs out of memory, the batch is halved for all."""
    rows: dict[str, dict[str, Any]] = {}
    # The one that needs the most memory goes first, so that less is measured in vain.
    for subject in sorted(subjects, key=lambda name: name not in PUBLISHED):
        reason = missing(subject, options.device)
        if reason is not None:
            rows[subject] = {"model": subject, "size": options.size, "failed": reason}
            continue
        say(f"{options.size} {subject}, batch {options.batch}")
        row = _attempt(subject, options)
        if row is not None and subject in PUBLISHED and os.environ.get("DISABLE_LLVM_OPT"):
            row["not_optimized"] = "DISABLE_LLVM_OPT was set"
        elif row is not None and "failed" in row and subject in PUBLISHED and options.device == "cuda":
            say(f"{options.size} {subject} fails: without LLVM's optimization of Triton kernels")
            reason = row["failed"]
            with _environment("DISABLE_LLVM_OPT", "1"):
                row = _attempt(subject, options)
            row = None if row is None else {**row, "not_optimized": reason}
        if row is not None and "failed" in row and options.compile and subject != "xlstm":
            say(f"{options.size} {subject} fails under torch.compile: without it")
            reason, row = row["failed"], _attempt(subject, replace(options, compile=False))
            row = None if row is None else {**row, "not_compiled": reason}
        if row is None and options.batch > 1:
            say(f"{options.size} {subject} does not fit with a batch of {options.batch}: all again with half of it")
            return compare(subjects, replace(options, batch=options.batch // 2), say)
        rows[subject] = row or {"model": subject, "size": options.size, "failed": "out of memory"}
    return [rows[subject] for subject in subjects]


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """For the processes that are started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def isolated(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a process of its own. A compiler that aborts takes only that one with it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()  # the child's copy is the last one: reading ends when it does
    try:
        kind, value = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process ended with code {process.exitcode} before it was done") from None
    process.join()
    if kind == "error":
        raise RuntimeError(value)
    return value


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send(("value", function(*arguments)))
    except Exception as error:
        sender.send(("error", f"{type(error).__name__}: {error}"))


def _attempt(subject: str, options: Options) -> dict[str, Any] | None:
    """A row; None where memory does not suffice."""
    if subject in PUBLISHED and options.device == "cuda":
        try:
            return isolated(_attempt_here, subject, options)
        except RuntimeError as error:
            return {"model": subject, "size": options.size, "failed": str(error)[:200]}
    return _attempt_here(subject, options)


def _attempt_here(subject: str, options: Options) -> dict[str, Any] | None:
    row: dict[str, Any] | None = None
    try:
        row = {**measure(subject, options), "batch": options.batch, "context": options.context}
    except Exception as error:  # a peer that cannot run here is reported, not hidden
        if not out_of_memory(error):
            if subject not in PUBLISHED:
                raise
            row = {"model": subject, "size": options.size, "failed": str(error).strip().splitlines()[0][:200]}
    release()  # out here: an error that is being handled holds on to the model
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| size | model | batch | ms | tokens/s | MFU | kernels ms | kernels % | GB |", "|" + "---|" * 9]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['size']} | {row['model']} | {row['failed']} |" + " |" * 6)
            continue
        mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
        memory = "" if row["peak_gigabytes"] is None else f"{row['peak_gigabytes']:.1f}"
        lines.append(
            f"| {row['size']} | {row['model']} | {row['batch']} | {row['milliseconds']:.1f} "
            f"| {row['tokens_per_second']:,.0f} | {mfu} | {row['kernel_milliseconds']:.1f} "
            f"| {100 * row['kernel_share']:.1f} | {memory} |"
        )
    return "\n".join(lines)
