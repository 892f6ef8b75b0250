"""An operator and the code of transformers that computes the same, timed in turns: what the scripts of them share."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
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
SIDES = ("transformers", "tfla")
Calls = dict[str, Callable[[], Any]]  # of each side: a function that computes a case once, and returns its results


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


def measure(case: Any, sides: Calls, bound: float, rounds: int, turn: float) -> dict[str, Any]:
    """bound: how far apart results may be."""
    apart = difference({name: sides[name]() for name in SIDES})
    if not apart < bound:
        raise SystemExit(f"tfla: {case}: results are {apart:.1e} apart, more than {bound:.0e}; nothing is timed")
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds):
        for name in SIDES if number % 2 else SIDES[::-1]:
            times[name].append(seconds(sides[name], turn))
    return {"case": asdict(case), "difference": apart, "seconds": times}


def measure_all(
    cases: tuple, calls: Callable[[Any], Calls], bound: Callable[[Any], float], rounds: int, threads: int, turn: float
) -> dict[str, Any]:
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
        print(case, file=sys.stderr, flush=True)
        found.append(measure(case, calls(case), bound(case), rounds, turn))
    return {"about": about, "cases": found}


def milliseconds(value: float) -> str:
    return f"{value * 1e3:,.0f} ms" if value >= 0.1 else f"{value * 1e3:.3g} ms"


def results(measured: dict[str, Any], Case: Callable[..., Any]) -> str:
    rows = []
    for found in measured["cases"]:
        theirs, ours = (found["seconds"][name] for name in SIDES)
        # Of each round, so that a slower mood of the machine is in both.
        faster = median(a / b for a, b in zip(theirs, ours, strict=True))
        rows.append([str(Case(**found["case"])), *map(milliseconds, (median(theirs), median(ours))), f"{faster:.1f}"])
    return table(["work", "transformers", "tfla", "times faster"], rows)


def about_line(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return (
        f"{about['cpu']}, {about['threads']} threads, {about['date']}; tfla {about['tfla']}, {packages}, Python "
        f"{about['python']}. Before it began, other processes took {about['busy_before']:.0%} of the cores."
    )


def main(
    name: str, description: str | None, examples: str, cases: tuple, quick: tuple, calls: Callable[[Any], Calls],
    bound: Callable[[Any], float], page: Callable[[dict[str, Any]], str],
) -> None:  # fmt: skip
    """Writes name.json and name.md."""
    parser = argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--rounds", type=int, default=3 * FEWEST, help=f"{FEWEST} or more (%(default)s)")
    parser.add_argument("--threads", type=int, default=threads, help="(default: every core)")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder (docs/benchmarks)")
    parser.add_argument("--quick", action="store_true", help="short sequences and turns")
    parser.add_argument("--page", action="store_true", help="only the page, from the folder's JSON file")
    given = parser.parse_args()
    for option, least in (("rounds", FEWEST), ("threads", 1)):
        if getattr(given, option) < least:
            parser.error(f"--{option} was {getattr(given, option)}; it must be {least} or more")
    given.out.mkdir(parents=True, exist_ok=True)
    file, turn = given.out / f"{name}.json", 0.02 if given.quick else TURN
    if not given.page:
        measured = measure_all(quick if given.quick else cases, calls, bound, given.rounds, given.threads, turn)
        file.write_text(json.dumps(measured, indent=1) + "\n")
    text = page(json.loads(file.read_text()))
    (given.out / f"{name}.md").write_text(text)
    print("\n".join(line for line in text.splitlines() if line.startswith("|")))
    print(f"written: {given.out}/{name}.md, {name}.json")
