"""Stored benchmarks of our own kernels as points for the figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .data import Array
from .model import Workload, chunkwise

ITEM = 4  # bytes of a float


@dataclass(frozen=True)
class Series:
    label: str
    chunk: Array
    milliseconds: Array
    flops_per_second: Array  # of the operations that the paper counts
    intensity: Array
    predicted: Array
    default: tuple[float, float] | None  # chunk and milliseconds of the plan's own choice
    peak_flops: float
    peak_bandwidth: float


def cpu_tiles(tfla: Path, report: dict[str, Any]) -> list[Series]:
    """Forward (mLSTMexp) over tile lengths on one core, where the tile is the paper's chunk. The state stays in the
    cache: only q, k, v, h and the gates move."""
    series = []
    for dqk, dhv in ((64, 64), (128, 256), (256, 512), (512, 512)):
        rows = [row for row in report["tiles"] if (row["dqk"], row["dhv"]) == (dqk, dhv)]
        seconds = np.array([row["forward_seconds"] for row in rows])
        workload = Workload(1, rows[0]["tokens"], rows[0]["heads"], dqk, dhv)
        count, _ = chunkwise(tfla, workload, "exp", ["forward"], ITEM)
        flops = np.array([count.total(workload, row["tile"]) for row in rows])
        moved = np.full(len(rows), workload.tokens * workload.heads * 2.0 * (dqk + dhv + 1) * ITEM)
        series.append(
            Series(
                label=f"{dqk}/{dhv}",
                chunk=np.array([float(row["tile"]) for row in rows]),
                milliseconds=1e3 * seconds,
                flops_per_second=flops / seconds,
                intensity=flops / moved,
                predicted=1e3 * np.array([row["forward_predicted"] for row in rows]),
                default=None,
                peak_flops=report["ceilings"]["flops_per_second"],
                peak_bandwidth=report["ceilings"]["bytes_per_second"],
            )
        )
    return series


def cpu_chunks(report: dict[str, Any]) -> list[Series]:
    """Training over the chunk sizes a caller may ask for, on one core."""
    series = []
    for dqk, dhv in dict.fromkeys((row["dqk"], row["dhv"]) for row in report["chunks"]):
        rows = [row for row in report["chunks"] if (row["dqk"], row["dhv"]) == (dqk, dhv)]
        asked = [row for row in rows if not row["default"]]

        def training(row: dict[str, Any], what: str) -> float:
            return 1e3 * float(row[f"forward_{what}"] + row[f"backward_{what}"])

        (own,) = (row for row in rows if row["default"])
        empty = np.full(len(asked), np.nan)
        series.append(
            Series(
                label=f"CPU core, {dqk}/{dhv}, $T$ = {own['tokens']:,}",
                chunk=np.array([float(row["chunk"]) for row in asked]),
                milliseconds=np.array([training(row, "seconds") for row in asked]),
                flops_per_second=empty,
                intensity=empty,
                predicted=np.array([training(row, "predicted") for row in asked]),
                default=(float(own["chunk"]), training(own, "seconds")),
                peak_flops=report["ceilings"]["flops_per_second"],
                peak_bandwidth=report["ceilings"]["bytes_per_second"],
            )
        )
    return series


def gpu(report: dict[str, Any] | None, dqk: int, dhv: int, operation: str, variant: str) -> Series | None:
    """Chunk sizes on a GPU, where benchmarks/gpu/chunk_sizes.py has run on one."""
    if report is None:
        return None
    wanted = (dqk, dhv, operation, variant)
    rows = [
        row for row in report["rows"] if tuple(row[key] for key in ("dqk", "dhv", "operation", "variant")) == wanted
    ]
    own = next((row for row in rows if row["default"]), None)
    rows = sorted({row["chunk"]: row for row in rows}.values(), key=lambda row: row["chunk"])
    if not rows:
        return None
    seconds, flops, moved, predicted, chunk = (
        np.array([float(row[key]) for row in rows]) for key in ("seconds", "flops", "bytes", "predicted", "chunk")
    )
    return Series(
        label=f"tfla on {report['name']}, {variant}, {dqk}/{dhv}",
        chunk=chunk,
        milliseconds=1e3 * seconds,
        flops_per_second=flops / seconds,
        intensity=flops / moved,
        predicted=1e3 * predicted,
        default=None if own is None else (float(own["chunk"]), 1e3 * float(own["seconds"])),
        peak_flops=np.nan,
        peak_bandwidth=np.nan,
    )


def gpu_within_best(report: dict[str, Any]) -> dict[str, float]:
    """The time of training at the plan's default over that at the best chunk size, by variant and head dimensions."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["operation"] == "training":
            series.setdefault(f"{row['variant']} {row['dqk']}/{row['dhv']}", []).append(row)
    ratios = {}
    for name, rows in series.items():
        for own in (row for row in rows if row["default"]):
            ratios[name] = own["seconds"] / min(row["seconds"] for row in rows)
    return ratios
