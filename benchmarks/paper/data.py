"""Reads what `tfla analyse` writes, and the stored benchmarks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Row = dict[str, str]


class Sheet:
    """A CSV file: rows to filter, columns to plot."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    @classmethod
    def read(cls, path: Path) -> Sheet:
        with path.open(newline="") as file:
            return cls(list(csv.DictReader(file)))

    def where(self, **wanted: object) -> Sheet:
        """The rows with these values; numbers are compared as such."""
        kept = [row for row in self.rows if all(same(row[key], value) for key, value in wanted.items())]
        if not kept:
            raise LookupError(f"no row has {wanted}")
        return Sheet(kept)

    def column(self, name: str) -> Array:
        return np.array([float(row[name]) for row in self.rows])

    def values(self, name: str) -> list[str]:
        """The different values of a column, in order of appearance."""
        return list(dict.fromkeys(row[name] for row in self.rows))

    def grid(self, x: str, y: str, z: str) -> tuple[Array, Array, Array]:
        """Axes and a matrix z[y, x]."""
        xs, ys = (np.unique(self.column(name)) for name in (x, y))
        matrix = np.full((len(ys), len(xs)), np.nan)
        matrix[np.searchsorted(ys, self.column(y)), np.searchsorted(xs, self.column(x))] = self.column(z)
        return xs, ys, matrix


def same(text: str, value: object) -> bool:
    if isinstance(value, str):
        return text == value
    if isinstance(value, int | float):
        return float(text) == float(value)
    raise TypeError(f"cannot compare {text!r} with {value!r}")


def stored(path: Path) -> dict[str, Any] | None:
    """A benchmark that a script left in docs/benchmarks, or nothing where it has not run yet."""
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content
