"""Runs `tfla bench` and reads the rows it writes."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """The program `tfla` and how it is to run."""

    path: Path
    threads: int
    min_time: float

    def bench(self, *options: str) -> dict[str, Any]:
        """The JSON of one run; the exponential gate, the default chunk size."""
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "bench.json"
            command = [str(self.path), "bench", "--gate", "exp", "--formulation", "chunkwise", "--json", str(report)]
            command += ["--threads", str(self.threads), "--min-time", str(self.min_time), *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"benchmarks: {' '.join(command)} failed: {done.stderr.strip()}")
            content: dict[str, Any] = json.loads(report.read_text())
            return content


def seconds(row: Row) -> float:
    return float(row["seconds"]["median"])


def find(rows: list[Row], **wanted: object) -> Row:
    """The one row with these values."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows with {wanted}")
    return found[0]
