"""Works through a table of runs within a number of seconds; called again, it goes on where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lm.experiments import tables, training
from benchmarks.lm.experiments.common import say
from benchmarks.lm.experiments.results import Results
from benchmarks.lm.experiments.tables import Run
from tfla.lm.training.checkpoint import steps
from tfla.lm.training.metrics import flops_per_token

VOCABULARY = 16384  # of the corpus, for estimates without it


@dataclass(frozen=True)
class Estimate:
    """Of a run on a GPU, from the rates of runs that were measured on one."""

    seconds: float
    source: str


def operations(run: Run) -> float:
    """Floating-point operations of training, per token."""
    config, plan = training.configs(run, VOCABULARY, 1e-3, "cuda")
    return flops_per_token(config, plan.context)


def measured(results: Results) -> list[tuple[Run, float, float]]:
    """(run, tokens per second, seconds besides them) of all results from a GPU."""
    found = []
    for name in tables.TABLES:
        for run, result in results.table(name):
            if result["mfu"] is not None and "threads" not in result["about"]["device"]:
                rate, seconds = result["tokens_per_second"], result["seconds"]
                more = 0.0 if seconds is None else max(seconds - result["tokens"] / rate, 0.0)
                found.append((run, rate, more))
    return found


def estimate(run: Run, known: list[tuple[Run, float, float]]) -> Estimate | None:
    """By tokens and the measured rate of the same model and size, else of another size, by operations."""
    same = [(rate, more) for other, rate, more in known if (other.size, other.model) == (run.size, run.model)]
    if same:
        return Estimate(run.tokens / min(rate for rate, _ in same) + max(more for _, more in same), "measured rate")
    others = [(other, rate, more) for other, rate, more in known if other.model == run.model]
    if not others:
        return None
    other, rate, more = max(others, key=lambda item: operations(item[0]))
    rate *= operations(other) / operations(run)
    return Estimate(run.tokens / rate + more, f"operations of {other.size}")


@dataclass(frozen=True)
class Place:
    data: Path
    scratch: Path  # of checkpoints, which stay on the machine
    device: str


def work(
    runs: list[Run],
    results: Results,
    place: Place,
    budget: float,
    train: Callable[..., dict | None] = training.train,
) -> list[Run]:
    """Runs that are still to do when the seconds are over.

    A run is begun only where it is thought to end within what is left, or where there is no estimate; one that has a
    checkpoint here goes on in any case. What the limit stops is resumed by the next call on this machine.
    """
    begin = time.monotonic()
    todo = [run for run in runs if results.read(run) is None]
    left: list[Run] = []
    for number, run in enumerate(todo):
        rest = budget - (time.monotonic() - begin)
        begun = bool(steps(place.scratch / run.table / run.name))
        need = None if place.device != "cuda" else estimate(run, measured(results))
        if rest <= 0 or (need is not None and need.seconds > rest and not begun):
            left.append(run)
            continue
        lr = results.rate(run)
        say(f"{run.table}: {run.name}, lr {lr:g}, {run.tokens / 1e6:g} M tokens, {rest:.0f} s left")
        result = train(run, place.data, lr, place.scratch, place.device, rest)
        if result is None:  # the seconds are over, or a signal has come
            return left + todo[number:]
        results.add(run, result)
        loss = result["failed"] or f"validation loss {result['validation_loss']:.4f}"
        say(f"{run.table}: {run.name}: {loss}, {result['tokens_per_second']:,.0f} tokens/s")
    return left


def listing(results: Results) -> str:
    """Every table with its runs, what is done, and the seconds on a GPU of the longest run and of all that is left."""
    known = measured(results)
    rows = ["table                runs  done  million tokens   longest run  seconds left  by"]
    for name, (about, _) in tables.TABLES.items():
        runs = tables.runs(name)
        done = {run.name for run, _ in results.table(name)}
        needs = [(run.name in done, estimate(run, known)) for run in runs]
        longest, left, source = "?", "?", "no measured rate"
        estimates = [need for _, need in needs if need is not None]
        if len(estimates) == len(runs):
            longest = f"{max(need.seconds for need in estimates):,.0f}"
            left = f"{sum(need.seconds for over, need in needs if need is not None and not over):,.0f}"
            source = ", ".join(sorted({need.source for need in estimates}))
        tokens = sum(run.tokens for run in runs) / 1e6
        rows.append(f"{name:<20} {len(runs):>4} {len(done):>5} {tokens:>15,.1f} {longest:>13} {left:>13}  {source}")
        rows.append(f"    {about}")
    return "\n".join(rows)
