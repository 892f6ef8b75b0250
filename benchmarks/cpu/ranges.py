"""Measures forward and backward over tile lengths and chunk sizes on one core, fits the cost model's constants to it,
and writes docs/benchmarks/cpu_ranges.json and src/plan/cost/cpu_rates.h. Build the library again afterwards; where the
new constants move a default of the plan (a test says so), measure once more."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs/benchmarks/cpu_ranges.json"
HEADER = ROOT / "src/plan/cost/cpu_rates.h"
EXAMPLES = """examples:
  cmake --build --preset release --target tfla_cpu_ranges    first
  python -m benchmarks.cpu.ranges                            measure on an idle machine, fit, write
  python -m benchmarks.cpu.ranges --measured docs/benchmarks/cpu_ranges.json    only fit
"""
ITEM = 4  # bytes of a float
NAMES = ("flop", "square", "state", "row")
# Matrix products per token with the state, and per column of a square with dqk and dhv: analysis::products.
PRODUCTS = {"forward": (2, 1, 1), "backward": (5, 3, 2)}

TEMPLATE = """// Written by benchmarks/cpu/ranges.py: the constants that fit docs/benchmarks/cpu_ranges.json best.
#pragma once

namespace tfla {{

// Seconds on one core.
struct CpuRates {{
  double flop;    // per operation of the matrix products
  double square;  // per element of a tile's square: exponentials, masks, sums
  double state;   // per byte of C and tile: passes over the state
  double row;     // per token: gates
}};

inline constexpr CpuRates cpu_forward_rates = {{{forward}}};
inline constexpr CpuRates cpu_backward_rates = {{{backward}}};

}}  // namespace tfla
"""


def features(operation: str, row: dict[str, Any]) -> list[float]:
    """What one token of one head costs, in units of each constant; src/plan/cost/cpu_time.cc says the same."""
    dqk, dhv, tile, chunk = (float(row[key]) for key in ("dqk", "dhv", "tile", "chunk"))
    state, square_qk, square_hv = PRODUCTS[operation]
    rebuilt = 1 - tile / chunk if operation == "backward" else 0.0
    flops = 2 * (state + rebuilt) * dqk * dhv + tile * (square_qk * dqk + square_hv * dhv)  # half squares
    return [flops, tile, dqk * dhv * ITEM / tile, 1.0]


def fit(operation: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The constants with the least sum of squared relative errors among those that are not negative."""
    seconds = np.array([row[f"{operation}_seconds"] / (row["tokens"] * row["heads"]) for row in rows])
    relative = np.array([features(operation, row) for row in rows]) / seconds[:, None]
    best, least = np.zeros(len(NAMES)), np.inf
    for size in range(1, len(NAMES) + 1):
        for columns in itertools.combinations(range(len(NAMES)), size):
            found = np.zeros(len(NAMES))
            found[list(columns)] = np.linalg.lstsq(relative[:, columns], np.ones(len(rows)))[0]
            error = float(np.sum((relative @ found - 1) ** 2))
            if (found >= 0).all() and error < least:
                best, least = found, error
    return {name: float(f"{value:.3e}") for name, value in zip(NAMES, best, strict=True)}


def measure(program: Path, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ranges.json"
        subprocess.run([str(program), str(path), str(rounds)], check=True)
        report: dict[str, Any] = json.loads(path.read_text())
        return report


def add_fit(report: dict[str, Any]) -> None:
    """Constants, and beside every measured time the one they predict."""
    rows = report["tiles"] + report["chunks"]
    report["rates"] = {operation: fit(operation, rows) for operation in PRODUCTS}
    errors = []
    for row in rows:
        for operation, rates in report["rates"].items():
            per_token = float(np.dot(features(operation, row), list(rates.values())))
            row[f"{operation}_predicted"] = per_token * row["tokens"] * row["heads"]
            errors.append(row[f"{operation}_predicted"] / row[f"{operation}_seconds"] - 1)
    report["fit"] = {
        "rms_relative_error": round(float(np.sqrt(np.mean(np.square(errors)))), 4),
        "largest_relative_error": round(float(np.max(np.abs(errors))), 4),
    }


def header(report: dict[str, Any]) -> str:
    def values(operation: str) -> str:
        return ", ".join(f"{value:.3e}" for value in report["rates"][operation].values())

    return TEMPLATE.format(forward=values("forward"), backward=values("backward"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/tfla_cpu_ranges", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--measured", type=Path, help="fit the measurements of this file instead of taking new ones")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds was {arguments.rounds}; it must be at least 1")
    if arguments.measured is None and not arguments.program.is_file():
        parser.error(f"--program was {arguments.program}; build the target tfla_cpu_ranges first")
    if arguments.measured is not None:
        report = json.loads(arguments.measured.read_text())
    else:
        report = measure(arguments.program, arguments.rounds)
    add_fit(report)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    HEADER.write_text(header(report))
    fitted = report["fit"]
    print(
        f"written: {REPORT.relative_to(ROOT)}, {HEADER.relative_to(ROOT)}; "
        f"error rms {fitted['rms_relative_error']:.1%}, largest {fitted['largest_relative_error']:.1%}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
