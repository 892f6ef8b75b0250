"""What follows from numbers of several seeds and what does not, and how pages show them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Student's t, two-sided 95 %, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


def deviation(values: Sequence[float]) -> float | None:
    """Of a sample; a single value has none."""
    return statistics.stdev(values) if len(values) > 1 else None


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and deviation, as the tables print them."""
    if not values:
        return ""
    spread = deviation(values)
    more = "" if spread is None else f" ± {spread:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f}{more}"


@dataclass(frozen=True)
class Difference:
    """Of two models by seed: seeds that both have share the order of data, so that they are compared in pairs."""

    mean: float
    deviation: float | None
    seeds: int

    @property
    def margin(self) -> float:
        """Half of the 95 % interval of the mean."""
        if self.deviation is None:
            return math.inf
        return T95[min(self.seeds - 1, max(T95))] * self.deviation / math.sqrt(self.seeds)

    @property
    def shown(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.mean) > self.margin


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """first - second, over seeds that both have."""
    pairs = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    if not pairs:
        return None
    return Difference(statistics.fmean(pairs), deviation(pairs), len(pairs))


def sentence(first: str, second: str, found: Difference, what: str, unit: str, digits: int = 4) -> str:
    """What follows of a difference first - second where less is better, and what does not."""
    value = f"{found.mean:+.{digits}f}{unit}"
    begin = f"{what} of {first} minus that of {second}: {value}"
    if found.deviation is None:
        return f"{begin}, of one seed. Nothing follows: one seed has no spread."
    interval = (
        f"(95 % interval {found.mean - found.margin:+.{digits}f} to {found.mean + found.margin:+.{digits}f}, "
        f"{found.seeds} seeds in pairs, deviation {found.deviation:.{digits}f})"
    )
    if not found.shown:
        return (
            f"{begin} {interval}. No difference follows: the interval holds 0. That both are equal does not follow "
            f"either; a difference below {abs(found.mean) + found.margin:.{digits}f}{unit} would not show."
        )
    better = second if found.mean > 0 else first
    return (
        f"{begin} {interval}. It follows that {better} is better here, by more than seeds differ. What does not "
        "follow: that it is at other sizes, on more tokens or on other text."
    )


def beside(name: str, value: float, others: Mapping[str, Sequence[float]], unit: str, digits: int = 4) -> list[str]:
    """One run of a model beside several seeds of others: a distance in their deviations, and no interval."""
    lines = []
    for other, values in others.items():
        spread = deviation(values)
        if spread is None:
            continue
        distance = value - statistics.fmean(values)
        times = f"{abs(distance) / spread:.1f} times" if spread > 0 else "beyond"
        lines.append(
            f"{name} (one seed) minus the mean of {other}: {distance:+.{digits}f}{unit}, {times} the deviation of "
            f"{other}'s seeds. Its own spread is not measured."
        )
    return lines


def grid(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [list(map(str, head)), ["---"] * len(head), *(list(map(str, row)) for row in rows)]
    return ["| " + " | ".join(line) + " |" if line[0] != "---" else "|" + "---|" * len(head) for line in lines] + [""]


def heading(about: dict[str, Any], commands: Iterable[str] = ()) -> str:
    given = [name for name, number in about["packages"].items() if number != "not installed"]
    packages = ", ".join(f"{name} {about['packages'][name]}" for name in given)
    more = "".join(f" `{command}`" for command in commands)
    return f"{about['device']}, {about['date']}, Python {about['python']}, {packages}.{more}"
