"""Figures of appendix G: time, intensity, rooflines and the best chunk size on each machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from .data import Sheet
from .measured import Series
from .style import CAUSAL_STYLE, MACHINE_COLOR, chunk_axis, legend_below, panels, plain_ticks, powers_axis, save

PAPER_MACHINES = ("V100", "A100", "H100", "B200")


def runtime(curves: Sheet, points: Series | None, stem: Path) -> None:
    figure, (axis,) = panels(1, width=5.6, height=3.6)
    for machine in ("A100", "H100", "B200", "H200"):
        part = curves.where(accelerator=machine)
        chunk, total, lower = (part.column(name) for name in ("chunk", "sum_ms", "overlapped_ms"))
        color = MACHINE_COLOR[machine]
        axis.plot(chunk, total, color=color, label=machine)
        axis.plot(chunk, lower, "--", color=color, alpha=0.6)
        axis.plot(chunk[total.argmin()], total.min(), "o", color=color, markersize=4)
    axis.plot([], [], "--", color="gray", label="overlapped")
    axis.plot([], [], "o", color="gray", markersize=4, label="best chunk")
    if points is not None:
        axis.plot(points.chunk, points.milliseconds, "k*-", linewidth=0.8, label=points.label)
    plain_ticks(axis, [0.5, 1, 2, 5, 10, 20])
    axis.set_ylabel("runtime in ms")
    chunk_axis(axis, 4, 13)
    axis.legend(ncol=2)
    save(figure, stem)


def intensity(curves: Sheet, machines: Sheet, stem: Path) -> None:
    figure, axes = panels(2, width=4.4, height=3.4, sharey=True)
    for axis, (state_bytes, title) in zip(axes, ((4, "states in float32"), (2, "states in bfloat16")), strict=True):
        for dhv in curves.values("dhv"):
            part = curves.where(dhv=float(dhv), state_bytes=state_bytes)
            axis.plot(part.column("chunk"), part.column("intensity"), label=f"$d_{{hv}}$ = {dhv}")
        for machine in PAPER_MACHINES:
            level = machines.where(accelerator=machine).column("intensity")[0]
            axis.axhline(level, linestyle=":", color=MACHINE_COLOR[machine], linewidth=1.2)
            above = machine in ("A100", "H100")  # the others are close below them
            axis.text(17, level * (1.04 if above else 0.96), machine, color=MACHINE_COLOR[machine], fontsize=7,
                      va="bottom" if above else "top")  # fmt: skip
        axis.set_yscale("log")
        axis.set_title(title)
        chunk_axis(axis, 4, 13)
    axes[0].set_ylabel("arithmetic intensity in FLOP/byte")
    axes[1].legend(loc="lower right")
    save(figure, stem)


def draw_roof(axis: Axes, name: str, flops: float, bandwidth: float, color: str, span: tuple[float, float]) -> None:
    x = np.geomspace(*span, 200)
    axis.loglog(x, np.minimum(bandwidth * x, flops), color=color, label=name)


def roofline(points: Sheet, machines: Sheet, gpu: Series | None, cpu: list[Series], stem: Path) -> None:
    figure, (left, right) = panels(2, width=4.6, height=3.6)
    for machine in ("V100", "A100", "H100", "H200"):
        row = machines.where(accelerator=machine)
        draw_roof(left, machine, row.column("flops_per_second")[0], row.column("bytes_per_second")[0],
                  MACHINE_COLOR[machine], (4, 3000))  # fmt: skip
    for chunk in (16, 64, 256, 1024, 4096):
        at = points.where(accelerator="H100", chunk=chunk).column("intensity")[0]
        left.axvline(at, color="gray", linewidth=0.7, linestyle=":")
        left.text(at, 3.6e15, f"$L$={chunk}", rotation=90, fontsize=7, ha="right", va="top", color="dimgray")
    if gpu is not None:
        left.plot(gpu.intensity, gpu.flops_per_second, "k*", label=gpu.label)
    left.set_ylim(1e13, 4e15)
    left.set_title("mLSTMsig forward, $d_{hv}$ = 512")
    left.legend(loc="lower right")
    ceiling = cpu[0]
    draw_roof(right, "this core", ceiling.peak_flops, ceiling.peak_bandwidth, "tab:brown", (1, 300))
    for series, marker in zip(cpu, "os^v", strict=False):
        right.plot(series.intensity, series.flops_per_second, marker, markersize=4, label=series.label)
    right.set_ylim(1e10, 2e11)
    right.set_title("our kernels on one CPU core, float32")
    right.legend(loc="lower right")
    for axis in (left, right):
        axis.set_xlabel("arithmetic intensity in FLOP/byte")
        axis.set_ylabel("FLOP/s")
    save(figure, stem)


def rates(curves: Sheet, points: Series | None, stem: Path) -> None:
    """FLOP/s rise with the chunk, but so do the FLOPs."""
    figure, (left, right) = panels(2, width=4.4, height=3.4)
    for machine in ("H100", "H200"):
        part = curves.where(accelerator=machine)
        chunk = part.column("chunk")
        left.plot(chunk, part.column("flops_per_second") / 1e12, color=MACHINE_COLOR[machine], label=machine)
        right.plot(chunk, part.column("sum_ms"), color=MACHINE_COLOR[machine], label=f"time on {machine}")
    part = curves.where(accelerator="H100")
    flops = right.twinx()
    flops.plot(part.column("chunk"), part.column("flops") / 1e12, "--", color="tab:blue")
    flops.set_ylabel("TFLOPs of the call", color="tab:blue")
    flops.grid(False)
    flops.set_ylim(bottom=0)
    right.plot([], [], "--", color="tab:blue", label="FLOPs")
    if points is not None:
        left.plot(points.chunk, points.flops_per_second / 1e12, "k*-", linewidth=0.8, label=points.label)
        right.plot(points.chunk, points.milliseconds, "k*-", linewidth=0.8, label=points.label)
    left.set_ylabel("TFLOP/s")
    right.set_ylabel("runtime in ms")
    plain_ticks(right, [1, 2, 3, 5, 10])
    for axis in (left, right):
        chunk_axis(axis, 4, 13)
    left.legend()
    right.legend(loc="upper center")
    save(figure, stem)


def over_head_dim(curves: Sheet, flop_optimal: Sheet, stem: Path) -> None:
    figure, axes = panels(2, width=4.4, height=3.4, sharey=True)
    for axis, (state_bytes, title) in zip(axes, ((4, "states in float32"), (2, "states in bfloat16")), strict=True):
        for machine in ("A100", "H100"):
            for causal, style in CAUSAL_STYLE.items():
                part = curves.where(accelerator=machine, state_bytes=state_bytes, causal=causal)
                axis.plot(part.column("dhv"), part.column("chunk"), style, color=MACHINE_COLOR[machine])
            axis.plot([], [], color=MACHINE_COLOR[machine], label=machine)
        for causal, style in CAUSAL_STYLE.items():
            axis.plot([], [], style, color="gray", label=rf"$F_\mathrm{{causal}}$ = {causal}")
        least = flop_optimal.where(pqk=0.5, causal=0.5)
        axis.plot(least.column("dhv"), least.column("chunk"), color="tab:blue", label=r"$L_\mathrm{opt,FLOP}$")
        axis.set_title(title)
        axis.set_xlabel("head dimension $d_{hv}$")
        axis.set_xticks([64, 512, 1024, 1536, 2048])
        powers_axis(axis, [4, 16, 64, 256, 1024])
    axes[0].set_ylabel(r"$L_\mathrm{opt,Runtime}$")
    legend_below(figure, axes[0])
    save(figure, stem, tight=False)


def over_intensity(curves: Sheet, machines: Sheet, stem: Path) -> None:
    figure, (axis,) = panels(1, width=5.2, height=3.6)
    for dhv in curves.values("dhv"):
        part = curves.where(dhv=float(dhv))
        axis.plot(part.column("intensity"), part.column("chunk"), label=f"$d_{{hv}}$ = {dhv}")
    for machine in (*PAPER_MACHINES, "H200"):
        level = machines.where(accelerator=machine).column("intensity")[0]
        axis.axvline(level, linestyle=":", color=MACHINE_COLOR[machine], linewidth=1.2)
        right = machine == "H100"  # B200 is just to the left of it
        axis.text(level, 15, machine, rotation=90, fontsize=7, va="bottom", ha="left" if right else "right",
                  color=MACHINE_COLOR[machine])  # fmt: skip
    axis.set_xlabel(r"accelerator intensity $I_\mathrm{acc}$ in FLOP/byte")
    axis.set_ylabel(r"$L_\mathrm{opt,Runtime}$")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left")
    save(figure, stem)


def predicted(series: list[Series], stem: Path) -> None:
    """Measured time over chunk sizes against the model with fitted constants, and what the plan chooses."""
    figure, axes = panels(len(series), width=3.4, height=3.1, in_row=4)
    for axis, one in zip(axes, series, strict=True):
        axis.plot(one.chunk, one.milliseconds, "k*-", linewidth=0.8, label="measured")
        axis.plot(one.chunk, one.predicted, "--", color="tab:blue", label="model")
        if one.default is not None:
            axis.plot(*one.default, "o", color="tab:red", fillstyle="none", markersize=9, label="plan's default")
        axis.set_title(one.label)
        axis.set_ylim(0, 1.15 * max(one.milliseconds.max(), one.predicted.max()))
        chunk_axis(axis, 5, 12)
        axis.set_xlim(26, 5000)
    axes[0].set_ylabel("forward + backward in ms")
    axes[0].legend(loc="lower right")
    save(figure, stem)
