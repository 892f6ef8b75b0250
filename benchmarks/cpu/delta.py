"""Times the gated delta rule on this CPU: tfla and what Hugging Face's Qwen3-Next computes it by where it finds no
kernels. Writes docs/benchmarks/delta_cpu.{json,md}.

Both sides normalise q and k themselves, and take turns in one process. Their results are compared before anything is
timed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.machine import busy_share, cpu_name
from benchmarks.common.markdown import table
from benchmarks.common.versions import versions

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs/benchmarks"
TURN = 0.4  # seconds that a side is timed for before the other has its turn; at least three calls
FEWEST = 5  # rounds

EXAMPLES = """examples:
  PYTHONPATH=python python -m benchmarks.cpu.delta                           measures, and writes both files
  PYTHONPATH=python python -m benchmarks.cpu.delta --quick --out /tmp/bench  to see that it works
  python -m benchmarks.cpu.delta --page                                      the page anew from the JSON file; no torch
"""


@dataclass(frozen=True)
class Case:
    operation: str  # forward, training or step
    tokens: int
    batch: int = 1
    heads: int = 4
    head_dim: int = 128
    dtype: str = "float32"

    def __str__(self) -> str:
        tokens = "1 token" if self.operation == "step" else f"{self.tokens:,} tokens"
        return f"{self.operation}, {self.batch} x {tokens}, {self.heads} heads of {self.head_dim}, {self.dtype}"


CASES = (
    Case("forward", 2048),
    Case("training", 2048),
    Case("forward", 2048, dtype="bfloat16"),
    Case("training", 2048, dtype="bfloat16"),
    Case("step", 1, heads=32),
    Case("step", 1, heads=32, batch=16),
)
QUICK = (Case("forward", 128), Case("training", 128), Case("step", 1))
SIDES = ("transformers", "tfla")

# ---------------------------------------------------------------- measuring


def calls(case: Case) -> dict[str, Callable[[], Any]]:
    """What each side is called with: a function that computes the case once, and returns its results."""
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    import tfla

    numbers = torch.Generator().manual_seed(1)
    training, dtype = case.operation == "training", getattr(torch, case.dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(case.batch, case.tokens, case.heads, *shape, generator=numbers)

    q, k, v = (normal(case.head_dim).to(dtype).requires_grad_(training) for _ in range(3))
    beta = torch.sigmoid(normal()).requires_grad_(training)
    g = torch.nn.functional.logsigmoid(normal() + 3).requires_grad_(training)
    state = torch.randn(case.batch, case.heads, case.head_dim, case.head_dim, generator=numbers)
    dh, inputs = torch.randn(v.shape, generator=numbers).to(dtype), (q, k, v, beta, g)
    # Not what stands there in its place where kernels are installed.
    chunkwise = inspect.unwrap(peer.torch_chunk_gated_delta_rule)
    token = inspect.unwrap(peer.torch_recurrent_gated_delta_rule)

    def theirs() -> Any:
        return chunkwise(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    def ours() -> Any:
        return tfla.delta_rule(q, k, v, beta, g, normalize_qk=True)

    def their_step() -> Any:
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return token(q, k, v, g=g, beta=beta, **options)

    pool = state.clone()

    def our_step() -> Any:
        """In place: the first call has the state that theirs has in every call."""
        return tfla.delta_rule_step(q, k, v, beta, g, pool, normalize_qk=True), pool

    if case.operation == "step":
        return {"transformers": torch.no_grad()(their_step), "tfla": torch.no_grad()(our_step)}
    if training:
        return {
            name: lambda function=function: torch.autograd.grad(function(), inputs, dh)
            for name, function in (("transformers", theirs), ("tfla", ours))
        }
    return {"transformers": torch.no_grad()(theirs), "tfla": torch.no_grad()(ours)}


def difference(results: dict[str, Any]) -> float:
    """The largest relative one between what both sides return."""
    from torch import Tensor

    pairs = [[x] if isinstance(x, Tensor) else list(x) for x in results.values()]
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(*pairs, strict=True))


def seconds(call: Callable[[], Any], turn: float) -> float:
    """The median of calls of one turn."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < turn:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return median(times)


def measure(case: Case, rounds: int, turn: float) -> dict[str, Any]:
    sides = calls(case)
    apart = difference({name: sides[name]() for name in SIDES})
    bound = 2.0**-7 if case.dtype == "bfloat16" else 1e-4
    if not apart < bound:
        raise SystemExit(f"delta: {case}: results are {apart:.1e} apart, more than {bound:.0e}; nothing is timed")
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
        "packages": versions("torch", "transformers"),
        "rounds": rounds,
    }
    found = []
    for case in cases:
        print(f"delta: {case}", file=sys.stderr, flush=True)
        found.append(measure(case, rounds, turn))
    return {"about": about, "cases": found}


# ---------------------------------------------------------------- the page


def milliseconds(value: float) -> str:
    return f"{value * 1e3:,.0f} ms" if value >= 0.1 else f"{value * 1e3:.3g} ms"


def results(measured: dict[str, Any]) -> str:
    rows = []
    for found in measured["cases"]:
        theirs, ours = (found["seconds"][name] for name in SIDES)
        # Of each round, so that a slower mood of the machine is in both.
        faster = median(a / b for a, b in zip(theirs, ours, strict=True))
        rows.append([str(Case(**found["case"])), *map(milliseconds, (median(theirs), median(ours))), f"{faster:.1f}"])
    return table(["work", "transformers", "tfla", "times faster"], rows)


def page(measured: dict[str, Any]) -> str:
    about = measured["about"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    text = (
        f"{about['cpu']}, {about['threads']} threads, {about['date']}; tfla {about['tfla']}, {packages}, Python "
        f"{about['python']}. Before it began, other processes took {about['busy_before']:.0%} of the cores. "
        "`tfla.delta_rule` and `tfla.delta_rule_step` beside the PyTorch code by which Qwen3-Next of transformers "
        "computes the same where it finds no kernels: `torch_chunk_gated_delta_rule`, and for a step "
        "`torch_recurrent_gated_delta_rule`. Both normalise q and k themselves and take turns in one process; medians "
        f"of {about['rounds']} rounds. Training is forward and all gradients."
    )
    command = "`PYTHONPATH=python python -m benchmarks.cpu.delta`"
    end = f"{command} writes this page and [delta_cpu.json](delta_cpu.json).\n"
    title = "# The gated delta rule on a CPU\n"
    return "\n".join([title, textwrap.fill(text, 130, break_on_hyphens=False) + "\n", results(measured), end])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--rounds", type=int, default=3 * FEWEST, help=f"{FEWEST} or more (%(default)s)")
    parser.add_argument("--threads", type=int, default=threads, help="(default: every core)")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder (docs/benchmarks)")
    parser.add_argument("--quick", action="store_true", help="short sequences and turns")
    parser.add_argument("--page", action="store_true", help="only the page, from the folder's JSON file")
    given = parser.parse_args()
    for name, least in (("rounds", FEWEST), ("threads", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name} was {getattr(given, name)}; it must be {least} or more")
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "delta_cpu.json"
    if not given.page:
        cases, turn = (QUICK, 0.02) if given.quick else (CASES, TURN)
        file.write_text(json.dumps(measure_all(cases, given.rounds, given.threads, turn), indent=1) + "\n")
    measured = json.loads(file.read_text())
    (given.out / "delta_cpu.md").write_text(page(measured))
    print(results(measured))
    print(f"written: {given.out}/delta_cpu.md, delta_cpu.json")


if __name__ == "__main__":
    main()
