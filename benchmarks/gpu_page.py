"""Writes docs/benchmarks/gpu.{json,md,png,svg} from what compare.py measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  the backend has to be chosen first

Measurements = dict[str, Any]

# The targets of the portable kernels, in ms and GB.
FORWARD_MS, TRAINING_MS, PEAK_GB = 3.5, 9.5, 4.4  # the peak at T 8,192
STEP_TARGETS = {1: "5 us", 64: "3.9 TB/s", 256: "3.9 TB/s"}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def names(measured: Measurements) -> list[str]:
    return list(next(iter(measured["lengths"].values())))


def times_table(measured: Measurements) -> str:
    lengths = list(measured["lengths"])
    rows = []
    for name in names(measured):
        cells = []
        for length in lengths:
            row = measured["lengths"][length][name]
            training = f"{row['training'] * 1e3:.2f}" if "training" in row else "fails"
            cells.append(f"{row['forward'] * 1e3:.2f} / {training}")
        peaks = [row[name]["peak_bytes"] for row in measured["lengths"].values() if "peak_bytes" in row[name]]
        rows.append([name, *cells, f"{max(peaks) / 1e9:.2f}" if peaks else ""])
    return table(["ms, forward / training", *(f"T {int(length):,}" for length in lengths), "peak GB"], rows)


def verdict_table(measured: Measurements) -> str:
    rows = []
    for gate in ("exp", "sig"):
        ours = [row[f"tfla mLSTM{gate}"] for row in measured["lengths"].values()]
        for what, key, scale, target, unit in (
            ("forward, every T", "forward", 1e3, FORWARD_MS, "ms"),
            ("training, every T", "training", 1e3, TRAINING_MS, "ms"),
            ("peak memory of training, T 8,192", "peak_bytes", 1e-9, PEAK_GB, "GB"),
        ):
            rows_of = [measured["lengths"]["8192"][f"tfla mLSTM{gate}"]] if key == "peak_bytes" else ours
            worst = max(row[key] for row in rows_of) * scale
            verdict = "met" if worst <= target else "**missed**"
            rows.append([f"mLSTM{gate}: {what}", f"at most {target} {unit}", f"{worst:.2f} {unit}", verdict])
    for step in measured["steps"]:
        if (batch := step["batch"]) not in STEP_TARGETS:
            continue
        if batch == 1:
            met, reached = step["seconds"] <= 5e-6, f"{step['seconds'] * 1e6:.2f} us"
        else:
            met, reached = step["bytes_per_second"] >= 3.9e12, f"{step['bytes_per_second'] / 1e12:.2f} TB/s"
        bound = "at most" if batch == 1 else "at least"
        rows.append([f"step, batch {batch}", f"{bound} {STEP_TARGETS[batch]}", reached, "met" if met else "**missed**"])
    return table(["what", "target", "measured", "verdict"], rows)


def step_table(measured: Measurements) -> str:
    rows = [
        [
            str(step["batch"]),
            f"{step['seconds'] * 1e6:.2f}",
            f"{step['bytes_per_second'] / 1e12:.2f}",
            f"{step['copy_bytes_per_second'] / 1e12:.2f}",
            f"{step['peer_seconds'] * 1e6:.2f}",
        ]
        for step in measured["steps"]
    ]
    return table(["batch", "tfla us", "TB/s on the state", "copy TB/s", "mlstm_kernels us"], rows)


def draw(measured: Measurements, out: Path) -> None:
    lengths = [int(length) for length in measured["lengths"]]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, key in zip(axes, ("forward", "training"), strict=True):
        for name in names(measured):
            rows = [measured["lengths"][str(length)][name] for length in lengths]
            points = [(length, row[key] * 1e3) for length, row in zip(lengths, rows, strict=True) if key in row]
            style = {"linewidth": 2.5, "marker": "o"} if name.startswith("tfla") else {"marker": "s", "linestyle": "--"}
            if points:
                axis.plot(*zip(*points, strict=True), label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title("forward" if key == "forward" else "forward and backward")
        axis.set_xlabel("sequence length T, 65,536 tokens in all")
        axis.set_ylabel("ms")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, loc="lower right")
    heads, dqk, dhv = measured["shape"]
    figure.suptitle(f"{measured['about']['gpu']}, bfloat16, {heads} heads of {dqk}/{dhv}")
    figure.tight_layout()
    for suffix in ("png", "svg"):
        figure.savefig(out / f"gpu.{suffix}", dpi=120)


def write(measured: Measurements, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    draw(measured, out)
    (out / "gpu.json").write_text(json.dumps(measured, indent=1) + "\n")
    about, tfla = measured["about"], measured["about"]["tfla"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    heads, dqk, dhv = measured["shape"]
    page = f"""# GPU benchmarks

Written by `benchmarks/compare.py`. {about["gpu"]}, {tfla["date"]}, tfla {tfla["tfla"]}, {packages}.

{measured["total_tokens"]:,} tokens in all, {heads} heads of {dqk}/{dhv}, bfloat16, gates in float32, default chunk
size; medians, peers and tfla in one run. tfla is timed through its C++ calls, recorded in a graph, training with
`keep_states`; peers through PyTorch by CUDA events. Simple GLA has no input gate and no normalizer. Peak memory: all
tensors of the call and its work space.

{times_table(measured)}
![times over sequence length](gpu.svg)

## Targets of the portable kernels
{verdict_table(measured)}
## Step: 8 heads of 256/512, float32 state, one token, in a graph
{step_table(measured)}"""
    (out / "gpu.md").write_text(page)
