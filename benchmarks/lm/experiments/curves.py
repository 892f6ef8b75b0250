"""What is kept of a log with a line per step: few points, and the spikes at full resolution."""

from __future__ import annotations

import math
import statistics
from typing import Any

POINTS = 200  # of a curve
WINDOW = 100  # steps whose median a gradient norm is compared with
SPIKE = 3.0  # times that median


def points(lines: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """The steps in at most POINTS bins: last tokens, mean loss, median and largest norm, largest input gate."""
    width = -(-len(lines) // POINTS)
    bins = [lines[begin : begin + width] for begin in range(0, len(lines), width)]
    gates = [[line["input_gate_max"] for line in part if line["input_gate_max"] is not None] for part in bins]
    norms = [[line["gradient_norm"] for line in part] for part in bins]
    return {
        "tokens": [part[-1]["tokens"] for part in bins],
        "loss": [round(statistics.fmean(line["loss"] for line in part), 5) for part in bins],
        "norm": [round(statistics.median(part), 5) for part in norms],
        "norm_max": [round(max(part), 5) for part in norms],
        "input_gate_max": [round(max(part), 4) if part else None for part in gates],
    }


def spikes(norms: list[float], warmup: int) -> dict[str, Any]:
    """Of gradient norms before clipping, after warm-up: how many exceed SPIKE times the median of the WINDOW before."""
    late = norms[warmup:]
    found = []
    for step in range(max(warmup, 1), len(norms)):
        middle = statistics.median(norms[max(step - WINDOW, 0) : step])
        if norms[step] > SPIKE * middle:
            found.append([step + 1, round(norms[step] / middle, 2)])
    return {
        "spikes": len(found), "first_spikes": found[:20],
        "norm_median": round(statistics.median(late), 5) if late else None,
        "norm_largest": round(max(late), 5) if late else None,
    }  # fmt: skip


def reduced(lines: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """lines: of log.jsonl, those of steps. A last step that is not finite is counted, not drawn."""
    finite = [line for line in lines if math.isfinite(line["loss"]) and math.isfinite(line["gradient_norm"])]
    rates = sorted(line["tokens_per_second"] for line in lines)
    return {
        "curve": points(finite) if finite else None,
        **spikes([line["gradient_norm"] for line in finite], warmup),
        "tokens": lines[-1]["tokens"], "tokens_per_second": rates[len(rates) // 2], "mfu": lines[-1]["mfu"],
    }  # fmt: skip
