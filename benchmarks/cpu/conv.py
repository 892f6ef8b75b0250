"""Times the causal convolution with SiLU on this CPU: tfla and PyTorch's conv1d. Writes conv_cpu.{json,md} of
docs/benchmarks.

Both sides take turns in one process. Their results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.machine import busy_share, cpu_name
from benchmarks.common.markdown import table
from benchmarks.common.versions import versions
from benchmarks.cpu.beside import FEWEST, OUT, difference, milliseconds, seconds

TURN = 0.1  # seconds that a side is timed for before the other has its turn; at least three calls

EXAMPLES = """examples:
  PYTHONPATH=python python -m benchmarks.cpu.conv                           measures, and writes both files
  PYTHONPATH=python python -m benchmarks.cpu.conv --quick --out /tmp/bench  to see that it works
  python -m benchmarks.cpu.conv --page                                      the page anew from the JSON file; no torch
"""


@dataclass(frozen=True)
class Case:
    operation: str  # forward or training
    channels: int
    dtype: str
    memory: str  # which lie side by side: channels or tokens
    tokens: int = 2048
    batch: int = 4

    def __str__(self) -> str:
        size = f"{self.batch} x {self.tokens:,} tokens, {self.channels:,} channels"
        return f"{self.operation}, {size}, {self.dtype}, {self.memory} side by side"


CASES = tuple(
    Case(operation, channels, dtype, memory)
    for channels, memory in ((1536, "channels"), (1536, "tokens"), (4352, "channels"))
    for dtype in ("float32", "bfloat16")
    for operation in ("forward", "training")
)
QUICK = tuple(Case(operation, 64, "float32", "channels", 64) for operation in ("forward", "training"))
SIDES = ("PyTorch", "tfla")
WIDTH = 4

# ---------------------------------------------------------------- measuring


def calls(case: Case) -> dict[str, Callable[[], Any]]:
    """What each side is called with: a function that computes the case once, and returns its results."""
    import torch
    import torch.nn.functional as F

    import tfla

    numbers = torch.Generator().manual_seed(1)
    training, dtype, along = case.operation == "training", getattr(torch, case.dtype), case.memory == "tokens"

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=numbers).to(dtype)

    def tokens() -> Any:
        """(B,T,D) in the order of memory asked for."""
        x = normal(case.batch, case.tokens, case.channels)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if along else x

    x, dy, weight, bias = tokens(), tokens(), normal(case.channels, WIDTH) / 2, normal(case.channels)
    inputs = tuple(given.requires_grad_(training) for given in (x, weight, bias))

    def theirs() -> Any:
        y = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=WIDTH - 1, groups=case.channels)
        return F.silu(y[:, :, : case.tokens]).transpose(1, 2)

    def ours() -> Any:
        return tfla.causal_conv1d(x, weight, bias, activation="silu")

    sides = (("PyTorch", theirs), ("tfla", ours))
    if training:
        return {name: lambda function=function: torch.autograd.grad(function(), inputs, dy) for name, function in sides}
    return {name: torch.no_grad()(function) for name, function in sides}


def measure(case: Case, rounds: int, turn: float) -> dict[str, Any]:
    sides = calls(case)
    apart = difference({name: sides[name]() for name in SIDES})
    bound = 2.0**-6 if case.dtype == "bfloat16" else 1e-4
    if not apart < bound:
        raise SystemExit(f"conv: {case}: results are {apart:.1e} apart, more than {bound:.0e}; nothing is timed")
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds):
        for name in SIDES if number % 2 else SIDES[::-1]:
            times[name].append(seconds(sides[name], turn))
    return {"case": asdict(case), "difference": apart, "seconds": times}


def measure_all(cases: tuple[Case, ...], rounds: int, threads: int, turn: float) -> dict[str, Any]:
    import torch

    import tfla

    torch.set_num_threads(threads)
    about = {
        "cpu": cpu_name(),
        "threads": threads,
        "busy_before": busy_share(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "tfla": tfla.__version__,
        "python": platform.python_version(),
        "packages": versions("torch"),
        "rounds": rounds,
    }
    found = []
    for case in cases:
        print(f"conv: {case}", file=sys.stderr, flush=True)
        found.append(measure(case, rounds, turn))
    return {"about": about, "cases": found}


# ---------------------------------------------------------------- the page


def results(measured: dict[str, Any]) -> str:
    rows = []
    for found in measured["cases"]:
        theirs, ours = (found["seconds"][name] for name in SIDES)
        # Of each round, so that a slower mood of the machine is in both.
        faster = median(a / b for a, b in zip(theirs, ours, strict=True))
        rows.append([str(Case(**found["case"])), *map(milliseconds, (median(theirs), median(ours))), f"{faster:.1f}"])
    return table(["work", "PyTorch", "tfla", "times faster"], rows)


def page(measured: dict[str, Any]) -> str:
    about = measured["about"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    text = (
        f"{about['cpu']}, {about['threads']} threads, {about['date']}; tfla {about['tfla']}, {packages}, Python "
        f"{about['python']}. Before it began, other processes took {about['busy_before']:.0%} of the cores. "
        f"`tfla.causal_conv1d` of width {WIDTH} with a bias and SiLU beside `F.conv1d` and `F.silu`. Both take turns "
        f"in one process; medians of {about['rounds']} rounds. Training is forward and all gradients."
    )
    command = "`PYTHONPATH=python python -m benchmarks.cpu.conv`"
    end = f"{command} writes this page and [conv_cpu.json](conv_cpu.json).\n"
    title = "# The causal convolution on a CPU\n"
    return "\n".join([title, textwrap.fill(text, 130, break_on_hyphens=False) + "\n", results(measured), end])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--rounds", type=int, default=FEWEST, help=f"{FEWEST} or more (%(default)s)")
    parser.add_argument("--threads", type=int, default=threads, help="(default: every core)")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder (docs/benchmarks)")
    parser.add_argument("--quick", action="store_true", help="short sequences and turns")
    parser.add_argument("--page", action="store_true", help="only the page, from the folder's JSON file")
    given = parser.parse_args()
    for name, least in (("rounds", FEWEST), ("threads", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name} was {getattr(given, name)}; it must be {least} or more")
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "conv_cpu.json"
    if not given.page:
        cases, turn = (QUICK, 0.02) if given.quick else (CASES, TURN)
        file.write_text(json.dumps(measure_all(cases, given.rounds, given.threads, turn), indent=1) + "\n")
    measured = json.loads(file.read_text())
    (given.out / "conv_cpu.md").write_text(page(measured))
    print(results(measured))
    print(f"written: {given.out}/conv_cpu.md, conv_cpu.json")


if __name__ == "__main__":
    main()
