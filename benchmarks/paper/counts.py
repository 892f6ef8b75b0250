"""Figures of appendix F: operations over the chunk size, and the chunk size that needs the fewest."""

from __future__ import annotations

from pathlib import Path

from .data import Sheet
from .style import CAUSAL_STYLE, chunk_axis, legend_below, panels, powers_axis, save


def formulations(curves: Sheet, stem: Path) -> None:
    """FLOPs of the three formulations, one panel per head dimension."""
    sizes = curves.values("dhv")
    figure, axes = panels(len(sizes), sharey=True)
    for axis, dhv in zip(axes, sizes, strict=True):
        panel = curves.where(dhv=float(dhv))
        dqk = panel.values("dqk")[0]
        for causal, style in CAUSAL_STYLE.items():
            part = panel.where(causal=causal)
            label = rf"chunkwise, $F_\mathrm{{causal}}$ = {causal}"
            axis.plot(part.column("chunk"), part.column("chunkwise"), style, color="tab:blue", label=label)
            axis.axhline(part.column("parallel")[0], linestyle=style, color="tab:red", alpha=0.8)
        axis.axhline(panel.column("recurrent")[0], color="tab:green")
        axis.set_yscale("log")
        axis.set_title(f"$d_{{qk}}$ = {dqk}, $d_{{hv}}$ = {dhv}")
        chunk_axis(axis, 1, 13, 3)
        axis.set_xlim(1, 8192)
    axes[0].set_ylabel("FLOPs (one head, $T$ = 8192)")
    axes[0].plot([], [], color="tab:red", label="fully parallel")
    axes[0].plot([], [], color="tab:green", label="recurrent")
    legend_below(figure, axes[0])
    save(figure, stem, tight=False)


def flop_optimal(curves: Sheet, stem: Path) -> None:
    shares = curves.values("pqk")
    figure, axes = panels(len(shares), width=4.2, sharey=True)
    for axis, share in zip(axes, shares, strict=True):
        for causal, style in CAUSAL_STYLE.items():
            part = curves.where(pqk=float(share), causal=causal)
            label = rf"$F_\mathrm{{causal}}$ = {causal}"
            axis.plot(part.column("dhv"), part.column("chunk"), style, color="tab:blue", label=label)
        axis.set_title(f"$p_{{qk}}$ = {float(share):.1f}")
        axis.set_xlabel("head dimension $d_{hv}$")
        axis.set_xticks([64, 512, 1024, 1536, 2048])
        powers_axis(axis, [2, 4, 8, 16, 32, 64])
        axis.legend()
    axes[0].set_ylabel(r"$L_\mathrm{opt,FLOP}$")
    save(figure, stem)
