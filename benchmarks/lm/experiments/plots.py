"""The pictures of the page: curves with the spread over seeds."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.lm.experiments import recall_page
from benchmarks.lm.experiments.common import LABELS
from benchmarks.lm.experiments.results import Results
from benchmarks.lm.experiments.tables import Run

Found = list[tuple[Run, dict[str, Any]]]
COLOURS = {model: f"C{number}" for number, model in enumerate(LABELS)}


def band(curves: list[list[float]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, least and largest of several curves, point by point, as far as all of them go."""
    columns = list(zip(*curves, strict=False))
    return [statistics.fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def smooth(values: list[float], width: int) -> list[float]:
    """Mean over the last `width` values."""
    return [statistics.fmean(values[max(0, j + 1 - width) : j + 1]) for j in range(len(values))]


def _banded(axes: Any, x: list[float], curves: list[list[float]], label: str, colour: str) -> None:
    mean, least, largest = band(curves)
    x = x[: len(mean)]
    axes.plot(x, mean, label=f"{label}, {len(curves)} seeds" if len(curves) > 1 else f"{label}, one seed", color=colour)
    if len(curves) > 1:
        axes.fill_between(x, least, largest, color=colour, alpha=0.25, linewidth=0)


def _save(figure: Any, path: Path, pyplot: Any) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def compare(found: Found, path: Path, pyplot: Any) -> None:
    """Loss, gradient norm and largest input gate over tokens."""
    figure, (loss, norm, gate) = pyplot.subplots(1, 3, figsize=(15, 4))
    for model, label in LABELS.items():
        curves = [result["curve"] for run, result in found if run.model == model and result["curve"]]
        if not curves:
            continue
        millions = [tokens / 1e6 for tokens in curves[0]["tokens"]]
        _banded(loss, millions, [smooth(curve["loss"], 5) for curve in curves], label, COLOURS[model])
        _banded(norm, millions, [curve["norm"] for curve in curves], label, COLOURS[model])
        for curve in curves:
            norm.plot(millions[: len(curve["norm_max"])], curve["norm_max"][: len(millions)], ".", markersize=2,
                      color=COLOURS[model])  # fmt: skip
        if curves[0]["input_gate_max"][0] is not None:
            _banded(gate, millions, [curve["input_gate_max"] for curve in curves], label, COLOURS[model])
    last = max(result["curve"]["loss"][len(result["curve"]["loss"]) // 10] for _, result in found if result["curve"])
    loss.set(xlabel="million tokens", ylabel="training loss", ylim=(None, last))
    norm.set(xlabel="million tokens", ylabel="gradient norm: median, and largest as dots", yscale="log")
    gate.set(xlabel="million tokens", ylabel="largest input gate pre-activation")
    for axes in (loss, norm, gate):
        axes.legend()
    _save(figure, path, pyplot)


def positions(found: Found, path: Path, pyplot: Any) -> None:
    """Loss over the position, with the training context marked."""
    having = [(run, result["positions"]) for run, result in found if result.get("positions")]
    if not having:
        return
    figure, axes = pyplot.subplots(figsize=(8, 4))
    first = having[0][1]
    middles = [(j + 0.5) * first["tokens_per_bin"] for j in range(len(first["loss"]))]
    for model, label in LABELS.items():
        curves = [part["loss"] for run, part in having if run.model == model]
        if curves:
            _banded(axes, middles, curves, label, COLOURS[model])
    axes.axvline(first["context"], color="grey", linestyle=":", label="training context")
    axes.set(xlabel="position in the stretch", ylabel="loss")
    axes.legend()
    _save(figure, path, pyplot)


def ablations(found: Found, path: Path, pyplot: Any) -> None:
    """Validation loss over the input gate's bias, for every eps."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axes, model in zip(panels, ("exp", "sigmoid"), strict=True):
        mine = [(run, r) for run, r in found if run.model == model and r["validation_loss"] is not None]
        for number, eps in enumerate(sorted({run.changes["cell_norm_eps"] for run, _ in mine})):
            losses: dict[float, list[float]] = {}
            for run, result in mine:
                if run.changes["cell_norm_eps"] == eps:
                    losses.setdefault(run.changes["input_gate_bias"], []).append(result["validation_loss"])
            biases = sorted(losses)
            means = [statistics.fmean(losses[bias]) for bias in biases]
            errors = [statistics.stdev(losses[bias]) if len(losses[bias]) > 1 else 0.0 for bias in biases]
            axes.errorbar(biases, means, errors, label=f"eps {eps:g}", color=f"C{number}", capsize=3)
        axes.set(title=LABELS[model], xlabel="input gate bias at the beginning", ylabel="validation loss ± deviation")
        axes.legend()
    _save(figure, path, pyplot)


def recalled(found: list[dict[str, Any]], path: Path, pyplot: Any) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for model, label in LABELS.items():
        curves = [list(result["accuracy"].values()) for result in found if result["model"] == model]
        if curves:
            pairs = [float(number) for number in found[0]["accuracy"]]
            _banded(axes, pairs, curves, label, COLOURS[model])
    axes.axvline(max(found[0]["task"]["trained"]), color="grey", linestyle=":", label="most pairs in training")
    axes.set(xlabel="pairs", ylabel="accuracy", ylim=(0, 1.02), xscale="log")
    axes.legend()
    _save(figure, path, pyplot)


def draw(results: Results, out: Path, pyplot: Any) -> list[str]:
    """Every picture that the page shows, by matplotlib's pyplot; returns their names."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for table in ("compare-160m", "compare-40m", "short-160m"):
        if found := results.table(table):
            compare(found, out / f"{table}.png", pyplot)
            drawn.append(f"{table}.png")
            if any(result.get("positions") for _, result in found):
                positions(found, out / f"{table}-positions.png", pyplot)
                drawn.append(f"{table}-positions.png")
    for table in ("ablations", "short-ablations"):
        if found := results.table(table):
            ablations(found, out / f"{table}.png", pyplot)
            drawn.append(f"{table}.png")
    if found := recall_page.read(results.folder):
        recalled(found, out / "recall.png", pyplot)
        drawn.append("recall.png")
    return drawn
