"""The plots beside docs/benchmarks/gpu.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  the backend has to be chosen first
from matplotlib.ticker import LogLocator  # noqa: E402

TITLES = {"forward": "forward", "training": "forward and backward"}
LABELS_ABREAST = 5  # in a legend; more take two lines


def curves(points: list[tuple[float, dict[str, Any]]], title: str, label: str, stem: Path, log: bool = False) -> None:
    """Times of every row over x, forward beside training. points: x and the rows there."""
    points = sorted(points, key=lambda point: point[0])
    names = dict.fromkeys(name for _, rows in points for name in rows)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, operation in zip(axes, TITLES, strict=True):
        for number, name in enumerate(names):
            line = [(x, 1e3 * rows[name][operation]) for x, rows in points if operation in rows.get(name, {})]
            style = {"linewidth": 2.5, "marker": "o"} if name.startswith("tfla") else {"marker": "s", "linestyle": "--"}
            if line:
                axis.plot(*zip(*line, strict=True), label=name, color=f"C{number}", **style)
        axis.set_xscale("log", base=2)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.set_ylim(bottom=0)
        ticks = [x for x, _ in points]
        axis.set_xticks(ticks, [f"{x:,.0f}" for x in ticks], rotation=30)
        axis.minorticks_off()
        axis.set_title(TITLES[operation])
        axis.set_xlabel(label)
        axis.set_ylabel("ms")
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    columns = len(labels) if len(labels) <= LABELS_ABREAST else -(-len(labels) // 2)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.07 if columns == len(labels) else 0.12, 1, 1))
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix), dpi=120)
    plt.close(figure)
