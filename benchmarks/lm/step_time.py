"""Time of a training step: tfla's xLSTM, the published xlstm package, and the Transformer, one after the other.

A step is forward, loss, backward, clipping and AdamW, on rows of random tokens, with float32 master weights. All
subjects share loss, clipping and optimizer. The published package runs as it is, and once more with its blocks under
torch.compile, as ours are. `python -m tfla.lm bench` times our own models alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla._options import unknown
from tfla.lm.checks import check_output, out_of_memory, sentence
from tfla.lm.commands import bench, flags
from tfla.lm.config import ModelConfig
from tfla.lm.training.loss import cross_entropy
from tfla.lm.training.timing import Setting, make_model, make_step, median_seconds, report

EXAMPLES = """examples:
  python -m benchmarks.lm.step_time --sizes 160m,400m,1.4b --json step.json
  python -m benchmarks.lm.step_time --sizes 1.4b --models exp,xlstm --batch 4 --fuse
  python -m benchmarks.lm.step_time --device cpu --sizes tiny --context 256 --batch 2 --no-compile"""
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


class Published(nn.Module):
    """xlstm's own model and kernels, with the loss all subjects share. Its master weights are float32 by autocast."""

    def __init__(self, config: ModelConfig, setting: Setting, compiled: bool) -> None:
        super().__init__()
        package: Any = importlib.import_module("xlstm.xlstm_large.model")
        chunkwise, sequence, step = XLSTM_KERNELS[setting.where.type]
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
        self.setting = setting
        self.cap = config.logit_soft_cap
        if compiled:
            for block in self.model.backbone.blocks:
                block.compile()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        kind, dtype = self.setting.where.type, self.setting.dtype
        with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
            x, _ = self.model.backbone(self.model.embedding(tokens))
        x = x.flatten(0, 1).to(dtype)
        compiled = self.setting.compile and kind == "cuda"
        return cross_entropy(x, self.model.lm_head.weight, targets.flatten(), self.cap, compiled=compiled)


def model_config(subject: str, setting: Setting) -> ModelConfig:
    if subject in PUBLISHED:
        return bench.model_config("exp", setting)
    if subject not in SUBJECTS:
        raise unknown("models", subject, SUBJECTS)
    return bench.model_config(subject, setting)


def check(subjects: tuple[str, ...], settings: list[Setting]) -> None:
    """What is unknown is refused before the first subject is measured, not when its turn comes."""
    if not settings:
        raise ValueError("tfla: sizes is empty; it must name presets, such as 160m")
    for setting in settings:
        for subject in subjects:
            model_config(subject, setting)


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


def fastest_attention(config: ModelConfig, setting: Setting) -> tuple[str, Any]:
    """PyTorch's attention backend with the shortest forward and backward at this shape."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if setting.where.type != "cuda":
        return "default", contextlib.nullcontext
    shape = (setting.batch, config.heads, setting.context, config.dim // config.heads)
    q, k, v = (torch.randn(shape, device="cuda", dtype=setting.dtype, requires_grad=True) for _ in range(3))
    times = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def call(backend: Any = backend) -> None:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        try:
            times[backend] = median_seconds(call, 3, setting.where)
        except RuntimeError:  # not available for this shape or GPU
            continue
    best = min(times, key=lambda backend: times[backend])
    return best.name, lambda: sdpa_kernel(best)


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


def measure(subject: str, setting: Setting) -> dict[str, Any]:
    """One subject's row of the table."""
    torch.manual_seed(0)
    config, where = model_config(subject, setting), setting.where
    attention, context = (
        fastest_attention(config, setting) if subject == "transformer" else (None, contextlib.nullcontext)
    )
    if subject in PUBLISHED:
        with where:
            module: nn.Module = Published(config, setting, setting.compile and subject == "xlstm-compiled")
        total_loss: Any = module
    else:
        module, total_loss = make_model(config, setting)
    step = make_step(module, total_loss, config.vocab, setting)
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with context():
        seconds = median_seconds(step, setting.steps, where)
        kernels, longest = kernel_seconds(step, KERNELS[subject], where.type)
    return {
        **report(subject, config, setting, seconds, step().item()),
        "kernel_milliseconds": 1e3 * kernels, "kernel_share": kernels / seconds, "attention": attention,
        "longest_kernels": [[name[:120], 1e3 * value] for name, value in longest],
    }  # fmt: skip


def release() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(subjects: tuple[str, ...], setting: Setting, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All subjects at one size and one batch: where one of them runs out of memory, the batch is halved for all."""
    rows: dict[str, dict[str, Any]] = {}
    # The one that needs the most memory goes first, so that less is measured in vain.
    for subject in sorted(subjects, key=lambda name: name not in PUBLISHED):
        reason = missing(subject, setting.where.type)
        if reason is not None:
            rows[subject] = {"model": subject, "size": setting.size, "failed": reason}
            continue
        say(f"{setting.size} {subject}, batch {setting.batch}")
        row = _attempt(subject, setting)
        if row is not None and subject in PUBLISHED and os.environ.get("DISABLE_LLVM_OPT"):
            row["not_optimized"] = "DISABLE_LLVM_OPT was set"
        elif row is not None and "failed" in row and subject in PUBLISHED and setting.where.type == "cuda":
            say(f"{setting.size} {subject} fails: without LLVM's optimization of Triton kernels")
            reason = row["failed"]
            with _environment("DISABLE_LLVM_OPT", "1"):
                row = _attempt(subject, setting)
            row = None if row is None else {**row, "not_optimized": reason}
        if row is not None and "failed" in row and setting.compile and subject != "xlstm":
            say(f"{setting.size} {subject} fails under torch.compile: without it")
            reason, row = row["failed"], _attempt(subject, replace(setting, compile=False))
            row = None if row is None else {**row, "not_compiled": reason}
        if row is None and setting.batch > 1:
            say(f"{setting.size} {subject} does not fit with a batch of {setting.batch}: all again with half of it")
            return compare(subjects, replace(setting, batch=setting.batch // 2), say)
        rows[subject] = row or {"model": subject, "size": setting.size, "failed": "out of memory"}
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


def _attempt(subject: str, setting: Setting) -> dict[str, Any] | None:
    """A row; None where memory does not suffice."""
    if subject in PUBLISHED and setting.where.type == "cuda":
        try:
            return isolated(_attempt_here, subject, setting)
        except RuntimeError as error:
            return {"model": subject, "size": setting.size, "failed": str(error)[:200]}
    return _attempt_here(subject, setting)


def _attempt_here(subject: str, setting: Setting) -> dict[str, Any] | None:
    row: dict[str, Any] | None = None
    try:
        row = measure(subject, setting)
    except Exception as error:  # a peer that cannot run here is reported, not hidden
        if not out_of_memory(error):
            if subject not in PUBLISHED:
                raise
            row = {"model": subject, "size": setting.size, "failed": str(error).strip().splitlines()[0][:200]}
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


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--sizes", type=flags.words, default=("160m",), help="presets; default 160m")
    parser.add_argument("--models", type=flags.words, default=SUBJECTS, help=f"some of {','.join(SUBJECTS)}")
    flags.add_fields(parser, Setting, without=("size",))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    try:
        check_output("json", arguments.json)
        given = flags.given(arguments, flags.names(Setting))
        settings = [Setting(size, **given) for size in arguments.sizes]
        check(arguments.models, settings)
        rows: list[dict[str, Any]] = []
        for setting in settings:
            rows += compare(arguments.models, setting, lambda text: print(f"step_time: {text}", file=sys.stderr))
            if arguments.json:  # after every size: what is measured is kept
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    except ValueError as error:
        if sentence(error) is None:
            raise
        print(sentence(error), file=sys.stderr)
        return 2
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
