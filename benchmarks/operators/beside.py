"""An operator and its peers on a GPU, through PyTorch, timed in turns: what the scripts of the operators share.

A process measures, and leaves every result in the JSON file as it comes. Another one watches it: where a peer takes the
process with it, or is silent for too long, that peer has a reason instead of times, and a new process goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.common.versions import versions
from benchmarks.operators.goals import COPIED, OURS, Goal
from benchmarks.operators.packages import use_folder
from benchmarks.operators.watch import BROKEN, ROOT, Content, Row, save, say, watch

if TYPE_CHECKING:
    from benchmarks.operators.problem import Problem

PACKAGES = ("torch", "triton", "fla-core", "mamba_ssm", "causal_conv1d", "flashinfer-python", "flash-qla")


Made = TypeVar("Made")


@dataclass(frozen=True)
class Case:
    problem: Problem
    goals: tuple[Goal, ...] = ()

    def __str__(self) -> str:
        return str(self.problem)

    @property
    def sides(self) -> tuple[str, ...]:
        return (*self.problem.sides, *((COPIED,) if self.problem.operation == "step" else ()))


@dataclass(frozen=True)
class Suite:
    name: str  # of its files
    title: str
    module: str  # that a process of its own runs
    about: str
    cases: Callable[[], list[Case]]


@dataclass(frozen=True)
class Clock:
    """How calls are timed; tests have another one."""

    device: str
    warm_up: Callable[[Callable[[], object]], float]
    burst: Callable[[Callable[[], object], float], float]
    captured: Callable[[Callable[[], object]], Callable[[], object]]  # many steps in a graph
    calls: int  # so many


def gpu_clock() -> Clock:
    import torch

    from benchmarks.gpu.peers import GRAPH_CALLS, burst_seconds, captured, warm_up

    if not torch.cuda.is_available():
        raise SystemExit("benchmarks: torch finds no GPU")
    return Clock("cuda", warm_up, burst_seconds, captured, GRAPH_CALLS)


# ---------------------------------------------------------------- the process that measures


@dataclass
class Run:
    suite: Suite
    file: Path
    rounds: int
    clock: Clock
    deadline: float  # of time.time(), after which no case is begun
    only: str = ""
    without: tuple[str, ...] = ()
    content: Content = field(default_factory=dict)

    def all_cases(self) -> None:
        self.content = json.loads(self.file.read_text())
        self.content["about"] |= self.about()
        rows = self.content["rows"]
        for case in self.suite.cases():
            if self.only not in str(case) or rows.get(str(case), {}).get("done"):
                continue
            if time.time() > self.deadline:
                say(f"left out, since the time is up: {case}")
                continue
            say(str(case))
            self.measure(case, rows.setdefault(str(case), {"sides": {}}))
            save(self.file, self.content)

    def about(self) -> dict[str, Any]:
        import torch

        import tfla

        on_gpu = self.clock.device == "cuda"
        return {
            "device": torch.cuda.get_device_name() if on_gpu else self.clock.device, "cuda": torch.version.cuda,
            "tfla": tfla.__version__, "python": platform.python_version(), "packages": versions(*PACKAGES),
        }  # fmt: skip

    def measure(self, case: Case, row: Row) -> None:
        """A side that fails has an error; a side that failed in a process before this one keeps it."""
        from benchmarks.gpu.worker import free
        from benchmarks.operators.problem import prepared

        problem = case.problem
        given = self.guarded(row, OURS, lambda: prepared(problem, problem.draw(self.clock.device))) or {}
        ready: dict[str, tuple[Callable[[], object], float]] = {}
        for name in case.sides if given else ():
            if name not in self.without and "error" not in row["sides"].get(name, {}):
                made = self.guarded(row, name, partial(self.ready, case, row, name, given))
                ready |= {name: made} if made else {}
        for number in range(self.rounds):
            turn = number % max(len(ready), 1)
            for name in (*list(ready)[turn:], *list(ready)[:turn]):
                if "error" not in row["sides"][name]:
                    self.guarded(row, name, partial(self.time, case, row["sides"][name], *ready[name]))
        for side in row["sides"].values():
            if "error" in side:
                side.pop("seconds", None)
        row["done"] = True
        ready.clear()
        given.clear()
        free()

    def guarded(self, row: Row, name: str, action: Callable[[], Made]) -> Made | None:
        """What the action makes, or None and an error of that side."""
        from benchmarks.gpu.worker import usable

        row["begun"] = name
        save(self.file, self.content)
        made = None
        try:
            made = action()
        except Exception as reason:  # a package that is absent, a result that is wrong, memory: the others go on
            error = (str(reason) or type(reason).__name__).strip().splitlines()[0]
            row["sides"].setdefault(name, {})["error"] = error
            say(f"  {name}: {error}")
        del row["begun"]
        save(self.file, self.content)
        if not usable():
            raise SystemExit(BROKEN)
        return made

    def ready(self, case: Case, row: Row, name: str, given: dict[str, Any]) -> tuple[Callable[[], object], float]:
        """Its call, found right and warm, and how long it takes."""
        from benchmarks.operators.problem import STATE, check, timed_call

        side: Row = {"seconds": []}
        if name == COPIED:
            source, target = given[STATE], given[STATE].clone()
            call: Callable[[], object] = lambda: target.copy_(source)  # noqa: E731
        else:
            inner = case.problem.side(name, given)
            side["apart"] = check(case.problem, given, inner)
            call = timed_call(case.problem, given, inner)
        call = self.clock.captured(call) if case.problem.operation == "step" else call
        once = self.clock.warm_up(call)
        row["sides"][name] = side
        return call, once

    def time(self, case: Case, side: Row, call: Callable[[], object], once: float) -> None:
        calls = self.clock.calls if case.problem.operation == "step" else 1
        side["seconds"].append(self.clock.burst(call, once) / calls)


# ---------------------------------------------------------------- the program


def arguments(suite: Suite, description: str | None, examples: str, given: Iterable[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"python -m {suite.module}", description=description, epilog=examples, formatter_class=form
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="a folder of packages, put on sys.path")
    parser.add_argument("--out", type=Path, default=ROOT / "build/benchmarks", help="the folder (build/benchmarks)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain this")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="a peer to leave out")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each side, in turns (%(default)s)")
    parser.add_argument("--budget", type=float, default=900, help="seconds after which no case is begun (%(default)s)")
    parser.add_argument("--limit", type=float, default=180, help="seconds of silence that end a peer (%(default)s)")
    parser.add_argument("--again", action="store_true", help="keep what the file has, and measure what it lacks")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and stop")
    parser.add_argument("--page", action="store_true", help="only the page, from the folder's JSON file; no GPU")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of the process that measures
    found = parser.parse_args(None if given is None else list(given))
    for name in ("rounds", "budget", "limit"):
        if getattr(found, name) <= 0:
            parser.error(f"--{name} was {getattr(found, name)}; it must be above 0")
    return found


def main(
    suite: Suite, description: str | None, examples: str, clock: Callable[[], Clock] = gpu_clock,
    given: Iterable[str] | None = None,
) -> None:  # fmt: skip
    """Writes NAME.json and NAME.md."""
    options = arguments(suite, description, examples, given)
    file = options.out.resolve() / f"{suite.name}.json"
    if options.list:
        print("\n".join(map(str, suite.cases())))
        return
    use_folder(options.peers)
    if options.until is not None:
        without = tuple(options.without)
        Run(suite, file, options.rounds, clock(), options.until, options.only, without).all_cases()
        return
    from benchmarks.operators.beside_page import write

    if not options.page:
        file.parent.mkdir(parents=True, exist_ok=True)
        begin(options, file)
        command = [
            sys.executable,
            "-m",
            suite.module,
            "--until",
            str(time.time() + options.budget),
            "--out",
            str(file.parent),
        ]
        command += ["--rounds", str(options.rounds), "--only", options.only]
        command += [text for name in options.without for text in ("--without", name)]
        command += ["--peers", str(options.peers.resolve())] if options.peers else []
        try:
            watch(command, file, options.limit, options.budget + options.limit)
        finally:
            if json.loads(file.read_text())["rows"]:
                write(suite, file)
    else:
        write(suite, file)


def begin(options: argparse.Namespace, file: Path) -> None:
    content: Content = {"about": {}, "rows": {}}
    if options.again and file.exists():
        content = json.loads(file.read_text())
    stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    content["about"] |= {"date": stamp, "rounds": options.rounds, "budget": options.budget}
    save(file, content)
