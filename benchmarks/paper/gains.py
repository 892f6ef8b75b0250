"""Figures of section 4.2 and appendix D: gain before and after the norm layer over both gates."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.image import AxesImage

from .data import Sheet
from .style import plt, save

AFTER = {"after_1e-2": r"after, $\epsilon$ = 1e-2", "after_1e-6": r"after, $\epsilon$ = 1e-6",
         "after_1e-8": r"after, $\epsilon$ = 1e-8"}  # fmt: skip
TEXT = {
    "max(|S1| exp(-m))": r"$\max(|\bar{S}1|, e^{-m})$",
    "max(|S1| 1)": r"$\max(|\bar{S}1|, 1)$",
    "|S1|": r"$|\bar{S}1|$",
    "S1": r"$\bar{S}1$",
    "1": "$1$",
}
DEFAULT = {"exp": "max(|S1| exp(-m))", "sig": "1"}


def map_panel(axis: Axes, sheet: Sheet, column: str) -> AxesImage:
    forget, inputs, gain = sheet.grid("forget_gate", "input_gate", column)
    norm = LogNorm(1e-3, 1e1, clip=True) if column == "before" else Normalize(0, 1)
    half_x, half_y = (forget[1] - forget[0]) / 2, (inputs[1] - inputs[0]) / 2
    extent = (forget[0] - half_x, forget[-1] + half_x, inputs[0] - half_y, inputs[-1] + half_y)
    axis.grid(False)
    shown = {"origin": "lower", "aspect": "auto", "cmap": "viridis", "interpolation": "none"}
    return axis.imshow(gain, extent=extent, norm=norm, **shown)


def add_colorbar(axis: Axes, image: AxesImage) -> None:
    bar = axis.figure.colorbar(image, ax=axis, shrink=0.9)
    bar.solids.set_rasterized(True)  # one picture instead of hundreds of rectangles


def finish(axis: Axes, first_column: bool, last_row: bool) -> None:
    axis.set_yticks([-12, -8, -4, 0, 4, 8])
    axis.set_xticks([-5, 0, 5, 10])
    axis.tick_params(labelleft=first_column, labelbottom=last_row)
    if last_row:
        axis.set_xlabel(r"forget gate $\tilde{f}$")


def both_gates(transfer: Sheet, stem: Path) -> None:
    """mLSTMexp and mLSTMsig with their default normalizers, before and after the norm."""
    figure, axes = plt.subplots(1, 4, figsize=(10.5, 3.0), layout="constrained")
    for number, gate in enumerate(("exp", "sig")):
        sheet = transfer.where(gate=gate, normalizer=DEFAULT[gate])
        for column, name in (("before", "before"), ("after_1e-6", AFTER["after_1e-6"])):
            axis = axes[2 * number + (column != "before")]
            image = map_panel(axis, sheet, column)
            axis.set_title(f"mLSTM{gate} {name}")
            finish(axis, axis is axes[0], True)
            add_colorbar(axis, image)
    axes[0].set_ylabel(r"input gate $\tilde{\imath}$")
    save(figure, stem, tight=False)


def normalizers(transfer: Sheet, gate: str, stem: Path) -> None:
    """A row per normalizer, a column per epsilon."""
    part = transfer.where(gate=gate)
    names = part.values("normalizer")
    columns = {"before": "before"} | AFTER
    figure, axes = plt.subplots(len(names), len(columns), figsize=(10.5, 2.1 * len(names) + 0.5), layout="constrained")
    for row, name in enumerate(names):
        for place, (column, title) in enumerate(columns.items()):
            axis = axes[row, place]
            image = map_panel(axis, part.where(normalizer=name), column)
            finish(axis, place == 0, row == len(names) - 1)
            if row == 0:
                axis.set_title(title)
            if place in (0, len(columns) - 1):
                add_colorbar(axis, image)
        axes[row, 0].set_ylabel(f"$n$ = {TEXT[name]}\n" + r"input gate $\tilde{\imath}$")
    save(figure, stem, tight=False)
