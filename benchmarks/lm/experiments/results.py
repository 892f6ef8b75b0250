"""Results: a file of JSON lines for every table, a line for every finished run. Files of several machines merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lm.experiments.common import write
from benchmarks.lm.experiments.tables import Run, runs

SUFFIX = ".jsonl"


def lines(path: Path) -> dict[str, dict[str, Any]]:
    """The results of a file by the names of their runs."""
    if not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {result.pop("run"): result for result in found}


def add_line(path: Path, name: str, result: dict[str, Any]) -> None:
    """Written anew as a whole, so that a call that is killed leaves the lines of before."""
    content = {**lines(path), name: result}
    text = [json.dumps({"run": run, **content[run]}) + "\n" for run in sorted(content)]
    write(path, "".join(text))


def merge(source: Path, target: Path) -> int:
    """Adds the results of another folder, and returns how many. Of a run that both have, the one of target stays."""
    added = 0
    for path in sorted(source.glob(f"*{SUFFIX}")):
        here = lines(target / path.name)
        for name, result in lines(path).items():
            if name not in here:
                add_line(target / path.name, name, result)
                added += 1
    return added


class Results:
    """Written to one folder; what other folders have counts as well, so that a machine's own results stay apart."""

    def __init__(self, folder: Path, *others: Path) -> None:
        self.folder, self.others = folder, others

    def _lines(self, table: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for folder in (*self.others, self.folder):
            found |= lines(folder / f"{table}{SUFFIX}")
        return found

    def read(self, run: Run) -> dict[str, Any] | None:
        return self._lines(run.table).get(run.name)

    def add(self, run: Run, result: dict[str, Any]) -> None:
        add_line(self.folder / f"{run.table}{SUFFIX}", run.name, result)

    def table(self, name: str) -> list[tuple[Run, dict[str, Any]]]:
        """What there is of a table, in its order. Runs on different tokens or of another length are refused."""
        there = self._lines(name)
        found = [(run, there[run.name]) for run in runs(name) if run.name in there]
        for key in ("data", "context", "batch", "steps"):
            values = {json.dumps(result[key]) for _, result in found}
            if len(values) > 1:
                raise ValueError(
                    f"tfla: results of table {name} have {key} {' and '.join(sorted(values))}; they cannot be compared"
                )
        return found

    def best_rates(self, size: str) -> dict[str, float]:
        """Of every model whose sweep is complete: the rate of the smallest validation loss."""
        table = f"sweep-{size}"
        losses: dict[str, dict[float, float]] = {}
        for run, result in self.table(table):
            assert run.lr is not None
            loss = result["validation_loss"]
            losses.setdefault(run.model, {})[run.lr] = float("inf") if loss is None else loss
        wanted: dict[str, int] = {}
        for run in runs(table):
            wanted[run.model] = wanted.get(run.model, 0) + 1
        complete = {model: rates for model, rates in losses.items() if len(rates) == wanted[model]}
        return {model: min(rates, key=rates.__getitem__) for model, rates in complete.items()}

    def rate(self, run: Run) -> float:
        if run.lr is not None:
            return run.lr
        best = self.best_rates(run.size)
        if run.model not in best:
            raise ValueError(
                f"tfla: lr of {run.name} comes from table sweep-{run.size}, of which results are missing in "
                f"{self.folder}; run that table first"
            )
        return best[run.model]
