"""The targets of calls that are timed beside others, and whether rows of beside.py meet them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.common.verdict import Verdict, at_least, at_most, failed, unmeasured

Row = dict[str, Any]
OURS, COPIED = "tfla", "copy"
MILLISECONDS, MICROSECONDS = "ms", "us"
AHEAD = "times faster than every peer"
COPY = "of the copy speed"
FACTORS = {MILLISECONDS: 1e3, MICROSECONDS: 1e6}


def times(peer: str) -> str:
    return f"times faster than {peer}"


def the_time_of(case: str) -> str:
    """How many times as long as another case."""
    return f"times the time of {case}"


@dataclass(frozen=True)
class Goal:
    unit: str  # of those above
    bound: float
    note: str = ""  # "the goal", where a milder target stands beside it

    @property
    def upwards(self) -> bool:
        return self.unit not in FACTORS and not self.unit.startswith(the_time_of(""))

    def words(self) -> str:
        return f"{'at least' if self.upwards else 'at most'} {self.bound:g} {self.unit}"


def seconds(row: Row | None, side: str) -> list[float]:
    """Of every round, nothing where there is none."""
    found: list[float] = (row or {}).get("sides", {}).get(side, {}).get("seconds", [])
    return found


def ratio(over: Iterable[float], under: Iterable[float]) -> float:
    """Of each round, so that a slower mood of the machine is in both."""
    return median(a / b for a, b in zip(over, under, strict=False))


def peers(row: Row) -> list[str]:
    return [name for name in row["sides"] if name not in (OURS, COPIED)]


def best_peer(row: Row) -> str | None:
    timed = [name for name in peers(row) if seconds(row, name)]
    return min(timed, key=lambda name: median(seconds(row, name)), default=None)


def reached(goal: Goal, row: Row, rows: dict[str, Row]) -> float | str:
    """A number, or why there is none."""
    ours = seconds(row, OURS)
    if goal.unit in FACTORS:
        return FACTORS[goal.unit] * median(ours)
    if goal.unit.startswith(the_time_of("")):
        other = seconds(rows.get(goal.unit.removeprefix(the_time_of(""))), OURS)
        return median(ours) / median(other) if other else "the other case is not measured"
    if goal.unit == AHEAD:
        peer = best_peer(row)
    else:
        peer = COPIED if goal.unit == COPY else goal.unit.removeprefix(times(""))
    theirs = seconds(row, peer) if peer else []
    return ratio(theirs, ours) if theirs else f"no time of {peer or 'any peer'}"


def judge_one(what: str, goal: Goal, row: Row | None, rows: dict[str, Row], why_not: str) -> Verdict:
    what += f" ({goal.note})" if goal.note else ""
    if row is None or OURS not in row["sides"]:
        return unmeasured(what, goal.words(), why_not)
    if not seconds(row, OURS):
        return failed(what, goal.words())
    found = reached(goal, row, rows)
    if isinstance(found, str):
        return unmeasured(what, goal.words(), found)
    return (at_least if goal.upwards else at_most)(what, goal.bound, found, goal.unit)


def judge(cases: Iterable[Any], rows: dict[str, Row], why_not: str) -> list[Verdict]:
    """cases: whose str is the key of their row. why_not: what is said of those without one."""
    return [judge_one(str(case), goal, rows.get(str(case)), rows, why_not) for case in cases for goal in case.goals]
