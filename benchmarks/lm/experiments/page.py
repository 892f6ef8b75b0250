"""docs/experiments/language_models.md and its plots, from the JSON of experiments.py."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

TARGETS = {  # of the step time at 1.4b: how many times that of tfla exp
    "xlstm": ("published xlstm, as it is / tfla exp", 1.25),
    "xlstm-compiled": ("published xlstm with its blocks under torch.compile / tfla exp", 1.25),
    "transformer": ("Transformer / tfla exp", 1.3),
}
LABELS = {"exp": "mLSTMexp", "sigmoid": "mLSTMsig", "transformer": "Transformer", "xlstm": "published xlstm"}


def smooth(values: list[float], width: int) -> list[float]:
    """Mean over the last `width` values."""
    return [statistics.fmean(values[max(0, j + 1 - width) : j + 1]) for j in range(len(values))]


def spikes(norms: list[float], skip: int) -> dict[str, float]:
    """After warm-up: the largest gradient norm, the median, and how often three times the median is passed."""
    late = norms[skip:]
    middle = statistics.median(late)
    return {"median": middle, "largest": max(late), "spikes": sum(norm > 3 * middle for norm in late)}


def heading(part: dict[str, Any]) -> str:
    given = part["about"]
    packages = ", ".join(f"{name} {number}" for name, number in given["packages"].items() if number != "not installed")
    commands = ", ".join(f"`{command}`" for command in part["commands"])
    return f"{given['gpu']}, {given['date']}, Python {given['python']}, {packages}. {commands}"


def gates_section(part: dict[str, Any], out: Path, pyplot: Any) -> list[str]:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    rows = []
    for name, run in part["runs"].items():
        kind, _, seed = name.partition(", ")
        style = {"color": f"C{list(LABELS).index(kind)}", "linestyle": "-" if seed == "seed 0" else "--"}
        tokens = [run["tokens"] * (j + 1) / len(run["loss"]) / 1e6 for j in range(len(run["loss"]))]
        left.plot(tokens, smooth(run["loss"], 20), label=f"{LABELS[kind]}, {seed}", **style)
        if run["input_gate_max"][0] is not None:
            right.plot(tokens, run["input_gate_max"], label=f"{LABELS[kind]}, {seed}", **style)
        perplexity = "" if run["validation_perplexity"] is None else f"{run['validation_perplexity']:.3f}"
        mfu = "" if run["mfu"] is None else f"{100 * run['mfu']:.0f} %"
        rows.append(
            f"| {LABELS[kind]} | {seed.removeprefix('seed ')} | {run['tokens'] / 1e6:.1f} M | {perplexity} "
            f"| {run['failed'] or ''} | {run['tokens_per_second']:,.0f} | {mfu} |"
        )
    left.set(xlabel="million tokens", ylabel="training loss, mean of 20 steps", ylim=(None, 6))
    right.set(xlabel="million tokens", ylabel="largest input gate pre-activation")
    for axes in (left, right):
        axes.legend()
    figure.tight_layout()
    figure.savefig(out / "gates.png", dpi=110)
    first = next(iter(part["runs"].values()))["recipe"]
    lines = [
        "## mLSTMexp, mLSTMsig and the Transformer",
        "",
        heading(part),
        "",
        f"The paper's {part['size']} shape on Python sources (BPE), {first['steps']} steps of {first['batch']} x "
        f"{first['context']} tokens, peak rate {first['lr']:g}; same tokens in the same order for the same seed.",
        "",
        "| model | seed | tokens | validation perplexity | failed | tokens/s | MFU |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "![loss and gate over training](gates.png)",
        "",
    ]
    return [*lines, *verdict(part)]


def verdict(part: dict[str, Any]) -> list[str]:
    """The claim under test: the distance of the two gates, beside that of two seeds of one gate."""
    by_gate: dict[str, list[float]] = {"exp": [], "sigmoid": []}
    for name, run in part["runs"].items():
        kind = name.partition(", ")[0]
        if kind in by_gate and run["validation_loss"] is not None:
            by_gate[kind].append(run["validation_loss"])
    if not all(by_gate.values()):
        return []
    distance = statistics.fmean(by_gate["sigmoid"]) - statistics.fmean(by_gate["exp"])
    seeds = [max(losses) - min(losses) for losses in by_gate.values() if len(losses) > 1]
    text = f"Validation loss of mLSTMsig minus that of mLSTMexp: {distance:+.4f} nats "
    text += f"({100 * math.expm1(distance):+.2f} % in perplexity)."
    if seeds:
        text += f" Two seeds of one gate differ by up to {max(seeds):.4f}."
    return [text, ""]


def ablations_section(part: dict[str, Any], out: Path, pyplot: Any) -> list[str]:
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True)
    rows = []
    for name, run in part["runs"].items():
        gate, bias, eps = name.split(", ")
        found = spikes(run["gradient_norm"], run["recipe"]["warmup"])
        loss = "" if run["validation_loss"] is None else f"{run['validation_loss']:.4f}"
        rows.append(
            f"| {LABELS[gate]} | {bias.removeprefix('bias ')} | {eps.removeprefix('eps ')} | {loss} "
            f"| {run['failed'] or ''} | {found['median']:.2f} | {found['largest']:.2f} | {found['spikes']} |"
        )
        if eps == "eps 1e-06":
            column = 0 if gate == "exp" else 1
            panels[0][column].plot(smooth(run["loss"], 10), label=bias)
            panels[1][column].semilogy(run["gradient_norm"], label=bias, linewidth=0.8)
    for column, gate in enumerate(("exp", "sigmoid")):
        panels[0][column].set(
            title=f"{LABELS[gate]}, eps 1e-6", ylabel="training loss, mean of 10 steps", ylim=(None, 7)
        )
        panels[1][column].set(xlabel="step", ylabel="gradient norm")
        panels[0][column].legend()
    figure.tight_layout()
    figure.savefig(out / "ablations.png", dpi=110)
    first = next(iter(part["runs"].values()))["recipe"]
    shape = ", ".join(f"{name} {value}" for name, value in part["model"].items())
    return [
        "## Input gate bias and norm eps",
        "",
        heading(part),
        "",
        f"{shape}, {first['steps']} steps of {first['batch']} x {first['context']} tokens, peak rate {first['lr']:g}. "
        "eps: of the norm after the cell. A spike is a gradient norm (before clipping) above three times the run's "
        "median after warm-up.",
        "",
        "| model | input gate bias | eps | validation loss | failed | median norm | largest | spikes |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        "![loss and gradient norm](ablations.png)",
        "",
    ]


def steps_section(part: dict[str, Any]) -> list[str]:
    from benchmarks.lm.step_time import table

    rows = [row for size in part["runs"].values() for row in size]
    lines = ["## Time of a training step", "", heading(part), "", table(rows), ""]
    remedies = {
        "not_compiled": "without torch.compile",
        "not_optimized": "without LLVM's optimization of Triton kernels (DISABLE_LLVM_OPT=1)",
    }
    notes = [
        f"{row['size']} {row['model']} ran {words}: {row[key]}"
        for row in rows
        for key, words in remedies.items()
        if key in row and "failed" not in row
    ]
    notes += [f"{row['size']} Transformer: attention {row['attention']}" for row in rows if row.get("attention")]
    lines += [f"- {note}" for note in notes]
    if notes:
        lines.append("")
    for name, rows in part["runs"].items():
        if name.startswith("1.4b,"):
            lines += targets(name, {row["model"]: row for row in rows if "milliseconds" in row})
    return lines


def targets(name: str, large: dict[str, dict[str, Any]]) -> list[str]:
    if "exp" not in large:
        return []
    ours = large["exp"]
    rows = []

    def row(what: str, target: str, measured: str, met: bool) -> None:
        rows.append(f"| {what} | {target} | {measured} | {'met' if met else '**missed**'} |")

    for peer, (what, target) in TARGETS.items():
        if peer in large:
            ratio = large[peer]["milliseconds"] / ours["milliseconds"]
            row(what, f"at least {target}", f"{ratio:.2f}", ratio >= target)
    if "sigmoid" in large:
        ratio = ours["milliseconds"] / large["sigmoid"]["milliseconds"]
        row("tfla exp / tfla sig", "within 3 %", f"{100 * (ratio - 1):+.1f} %", abs(ratio - 1) <= 0.03)
    share = ours["kernel_share"]
    row("kernels' share of the step", "at most 12 %", f"{100 * share:.1f} %", share <= 0.12)
    return [f"### Targets: {name}", "", "| what | target | measured | verdict |", "|---|---|---|---|", *rows, ""]


def draw(results: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = json.loads(results.read_text())
    out.mkdir(parents=True, exist_ok=True)
    lines = ["# Language model experiments", "", "Written by `python -m benchmarks.lm.experiments --draw`.", ""]
    if "gates" in content:
        lines += gates_section(content["gates"], out, pyplot)
    if "ablations" in content:
        lines += ablations_section(content["ablations"], out, pyplot)
    if "steps" in content:
        lines += steps_section(content["steps"])
    (out / "language_models.md").write_text("\n".join(lines))
    (out / "language_models.json").write_text(json.dumps(content) + "\n")
    print(f"written {out / 'language_models.md'}")
