"""Fits the cost model to times over chunk sizes on a GPU (benchmarks/gpu/chunk_sizes.py) and prints the constants, and
beside every measured time the one they predict. With --write they go into src/plan/cost/cuda_rates.h, from which the
plan's default chunk follows: build again.

A token of one head costs: operations of the products, elements of a chunk's squares on and below the diagonal (tiles of
64), bytes of its state over the chunk, bytes of its rows; src/plan/cost/cuda_time.cc says the same."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "src/plan/cost/cuda_rates.h"
EXAMPLES = """examples:
  python -m benchmarks.gpu.fit_chunk_model docs/benchmarks/chunk_sizes_cuda.json            print the constants
  python -m benchmarks.gpu.fit_chunk_model docs/benchmarks/chunk_sizes_cuda.json --write    and write them
"""
Row = dict[str, Any]
Array = NDArray[np.float64]

TILE, LONGEST = 64, 1024
NAMES = ("flop", "square", "state", "row")
# Matrix products per token with the state: analysis::products.
STATE_PRODUCTS = {"forward": 2, "training": 7}
# The variants that the plan's constants describe, and the names and types they have there.
CONSTANTS = {
    "portable bfloat16": ("cuda_half_constants", "bfloat16 and float16"),
    "portable float32": ("cuda_float_constants", "float32 and float64"),
}
ITEM = {"portable bfloat16": 2, "portable float32": 4}
WIDTH = {"portable bfloat16": 128, "portable float32": 64}  # columns of an output that a block has

TEMPLATE = """\
// Constants of the cost model for the portable CUDA kernels. benchmarks/gpu/fit_chunk_model.py --write puts those here
// that fit docs/benchmarks/chunk_sizes_cuda.json best.
#pragma once

namespace tfla {{

// Seconds on a GPU that has enough to do, per head.
struct CudaRates {{
  double flop;    // per operation of the matrix products
  double square;  // per gated element of a chunk's squares: exponentials, masks, sums
  double state;   // per byte of C and chunk: states on their way between kernels
  double row;     // per byte of q, k and v and token
}};

// Of the portable kernels, with states kept for backward in training.
struct CudaConstants {{
  CudaRates forward;
  CudaRates training;
}};

{constants}
}}  // namespace tfla
"""


def squares(row: Row) -> tuple[float, float, float]:
    """Products per element of the squares, by dqk and dhv, and how often it is gated: once for every part of a head."""
    qk_parts, hv_parts = (math.ceil(row[key] / WIDTH[row["variant"]]) for key in ("dqk", "dhv"))
    if row["operation"] == "forward":
        return hv_parts, 1, hv_parts
    return 2 * hv_parts + 2, 2 * qk_parts + 2, 2 * hv_parts + 2 * qk_parts


def features(row: Row) -> list[float]:
    """What one token of one head costs, in units of each constant."""
    dqk, dhv, chunk = (float(row[key]) for key in ("dqk", "dhv", "chunk"))
    item = ITEM[row["variant"]]
    square_qk, square_hv, gated = squares(row)
    square = (chunk + TILE) / 2
    flops = 2 * (STATE_PRODUCTS[row["operation"]] * dqk * dhv + square * (square_qk * dqk + square_hv * dhv))
    return [flops, square * gated, dqk * dhv * item / chunk, (2 * dqk + dhv) * item]


def least_error(costs: Array, times: Array) -> Array:
    """The constants with the least sum of squared relative errors among those that are not negative, to four digits."""
    relative = costs / times[:, None]
    count = costs.shape[1]
    best, least = np.zeros(count), np.inf
    for size in range(1, count + 1):
        for columns in itertools.combinations(range(count), size):
            found = np.zeros(count)
            found[list(columns)] = np.linalg.lstsq(relative[:, columns], np.ones(len(times)))[0]
            error = float(np.sum((relative @ found - 1) ** 2))
            if (found >= 0).all() and error < least:
                best, least = found, error
    return np.array([float(f"{value:.3e}") for value in best])


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Of the rows of one variant and operation; adds to each what the constants predict."""
    tokens = np.array([float(row["batch"] * row["tokens"] * row["heads"]) for row in rows])
    costs = np.array([features(row) for row in rows])
    found = least_error(costs, np.array([row["seconds"] for row in rows]) / tokens)
    for row, cost, count in zip(rows, costs, tokens, strict=True):
        row["predicted"] = float(cost @ found * count)
    return dict(zip(NAMES, (float(value) for value in found), strict=True))


def fit_two_rates(rows: Sequence[Row]) -> dict[str, float]:
    """The paper's model as it stands, for kernels that the four constants do not describe: FLOPs and bytes."""
    costs = np.array([[row["flops"], row["bytes"]] for row in rows])
    found = least_error(costs, np.array([row["seconds"] for row in rows]))
    for row, cost in zip(rows, costs, strict=True):
        row["predicted"] = float(cost @ found)
    return {"seconds_per_flop": float(found[0]), "seconds_per_byte": float(found[1])}


def groups(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def mark_default(rows: Sequence[Row]) -> None:
    """Of one variant and head: the chunk that the plan takes by these constants, best_cuda_chunk in cuda_time.cc."""
    times = {row["chunk"]: row["predicted"] for row in rows if row["operation"] == "training"}
    allowed = [chunk for chunk in times if chunk <= LONGEST]
    best = min(allowed, key=lambda chunk: times[chunk], default=None)
    for row in rows:
        row["default"] = row["chunk"] == best


def add_fit(report: dict[str, Any]) -> None:
    """The constants of every variant, and beside every measured time the one they predict."""
    report["rates"] = {}
    for (variant, operation), rows in groups(report["rows"], "variant", "operation").items():
        rates = fit(rows) if variant in CONSTANTS else fit_two_rates(rows)
        report["rates"].setdefault(variant, {})[operation] = rates
    for (variant, *_), rows in groups(report["rows"], "variant", "dqk", "dhv").items():
        if variant in CONSTANTS:
            mark_default(rows)


def comparison(report: dict[str, Any]) -> str:
    """Times over chunk sizes: measured, predicted, and where the plan's default stands."""
    lines = []
    for (variant, operation, dqk, dhv), rows in groups(report["rows"], "variant", "operation", "dqk", "dhv").items():
        lines.append(f"{variant}, {operation}, {dqk}/{dhv}")
        lines.append("  chunk   measured  predicted   error")
        for row in sorted(rows, key=lambda row: (row["chunk"], row["default"])):
            mine, model = 1e3 * row["seconds"], 1e3 * row["predicted"]
            mark = "  the plan's default" if row["default"] else ""
            lines.append(f"{row['chunk']:7}  {mine:6.3f} ms  {model:6.3f} ms  {model / mine - 1:+6.1%}{mark}")
        best, model_best = (min(rows, key=lambda row: row[by]) for by in ("seconds", "predicted"))
        verdict = f"  best measured {best['chunk']}, best by the model {model_best['chunk']}"
        for own in (row for row in rows if row["default"]):
            verdict += f"; the plan's {own['chunk']} is {own['seconds'] / best['seconds'] - 1:+.1%} from the best"
        lines.append(verdict)
    return "\n".join(lines) + "\n"


def constants(report: dict[str, Any], variant: str) -> str | None:
    """As C++, where both operations were measured."""
    name, types = CONSTANTS[variant]
    rates = report["rates"].get(variant, {})
    if not all(operation in rates for operation in STATE_PRODUCTS):
        return None
    forward, training = (
        "{" + ", ".join(f"{rates[operation][key]:.3e}" for key in NAMES) + "}" for operation in ("forward", "training")
    )
    line = f"inline constexpr CudaConstants {name} = {{"
    where = f"fitted to times on {report['name']}, {report['date'][:10]}"
    return f"// {types}; {where}.\n{line}{forward},\n{' ' * len(line)}{training}}};\n"


def header(report: dict[str, Any], before: str) -> str:
    """before: the header until now; what was not measured stays as it is there."""
    blocks = []
    for variant, (name, _) in CONSTANTS.items():
        block = constants(report, variant)
        if block is None:
            found = re.search(rf"// [^\n]*\ninline constexpr CudaConstants {name} = [^;]*;\n", before)
            if found is None:
                raise SystemExit(f"fit_chunk_model: no times of {variant}, and no {name} in the header either")
            block = found.group()
        blocks.append(block)
    return TEMPLATE.format(constants="".join(blocks))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.json", help="what benchmarks/gpu/chunk_sizes.py wrote")
    parser.add_argument("--write", action="store_true", help=f"write the constants to {HEADER.relative_to(ROOT)}")
    parser.add_argument("--header", type=Path, default=HEADER, help="the header, if another one (%(default)s)")
    given = parser.parse_args()
    try:
        report = json.loads(given.file.read_text())
        add_fit(report)
    except (OSError, ValueError, KeyError) as reason:
        parser.error(f"FILE.json was {given.file}, which chunk_sizes.py did not write ({reason!r})")
    print(comparison(report))
    text = header(report, given.header.read_text())
    print(text, end="")
    if given.write:
        given.file.write_text(json.dumps(report, indent=1) + "\n")
        given.header.write_text(text)
        print(f"written: {given.header}, {given.file}")


if __name__ == "__main__":
    main()
