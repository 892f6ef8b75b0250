"""How every figure looks, and how it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  the backend has to be chosen first
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

MACHINE_COLOR = {
    "V100": "tab:gray",
    "A100": "tab:orange",
    "H100": "tab:green",
    "B200": "tab:purple",
    "H200": "tab:red",
}
CAUSAL_STYLE = {0.5: "-", 0.66: "--", 1.0: ":"}

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "legend.fontsize": 8,
        "legend.framealpha": 0.85,
        "lines.linewidth": 1.5,
        "svg.hashsalt": "tfla",  # the same figure gives the same file
        "svg.fonttype": "none",  # text stays text
    }
)


def panels(
    count: int, width: float = 3.6, height: float = 3.1, sharey: bool = False, in_row: int = 5
) -> tuple[Figure, list[Axes]]:
    """Side by side, `in_row` at most."""
    rows = -(-count // in_row)
    columns = -(-count // rows)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), sharey=sharey, squeeze=False)
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def chunk_axis(axis: Axes, smallest: int = 4, largest: int = 13, every: int = 1) -> None:
    """Powers of two from left to right."""
    axis.set_xscale("log", base=2)
    ticks = [2**x for x in range(smallest, largest + 1, every)]
    axis.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
    axis.set_xlim(ticks[0], ticks[-1])
    axis.set_xlabel("chunk size $L$")


def powers_axis(axis: Axes, ticks: Sequence[int]) -> None:
    """The same from bottom to top."""
    axis.set_yscale("log", base=2)
    axis.set_yticks(ticks, [str(tick) for tick in ticks])


def legend_below(figure: Figure, axis: Axes) -> None:
    """One legend for all panels, where it hides nothing."""
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)


def plain_ticks(axis: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic axis with numbers a person would choose."""
    axis.set_yscale("log")
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def save(figure: Figure, stem: Path, tight: bool = True) -> None:
    if tight:
        figure.tight_layout()
    figure.savefig(stem.with_suffix(".png"), dpi=110)
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
