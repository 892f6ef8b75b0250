"""Writes docs/benchmarks/gpu.{json,md,png,svg} from what compare.py measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  the backend has to be chosen first

Measurements = dict[str, Any]

# Targets in ms: up to T 8,192, at 32,768 and at 65,536; of other shapes; the peak in GB at T 8,192.
FORWARD_MS, TRAINING_MS = {8192: 0.52, 32_768: 0.65, 65_536: 0.80}, {8192: 2.3, 32_768: 2.6, 65_536: 2.9}
OTHER_MS = {"8 heads of 256/512, T 8,192": (0.95, 3.6), "4 heads of 128/256, T 65,536, batch 1": (0.30, 0.90)}
PEAK_GB = 4.4
STEP_TARGETS = {1: "5 us", 64: "3.9 TB/s", 256: "3.9 TB/s"}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def names(measured: Measurements) -> list[str]:
    return list(next(iter(measured["lengths"].values())))


def times_table(measured: Measurements, kind: str = "") -> str:
    lengths = list(measured["lengths"])
    rows = []
    for name in names(measured):
        cells = []
        for length in lengths:
            row = measured["lengths"][length][name]
            training = f"{row['training' + kind] * 1e3:.2f}" if "training" in row else "fails"
            cells.append(f"{row['forward' + kind] * 1e3:.2f} / {training}")
        peaks = [row[name]["peak_bytes"] for row in measured["lengths"].values() if "peak_bytes" in row[name]]
        rows.append([name, *cells, f"{max(peaks) / 1e9:.2f}" if peaks else ""])
    return table(["ms, forward / training", *(f"T {int(length):,}" for length in lengths), "peak GB"], rows)


def judged(what: str, target: float, reached: float, unit: str) -> list[str]:
    verdict = "met" if reached <= target else "**missed**"
    return [what, f"at most {target} {unit}", f"{reached:.2f} {unit}", verdict]


def verdict_table(measured: Measurements) -> str:
    rows = []
    for gate in ("exp", "sig"):
        name = f"tfla mLSTM{gate}"
        for key, targets in (("forward", FORWARD_MS), ("training", TRAINING_MS)):
            shortest = 0
            for longest, target in targets.items():
                times = [row[name][key] for T, row in measured["lengths"].items() if shortest < int(T) <= longest]
                if times:
                    rows.append(judged(f"mLSTM{gate}: {key}, T up to {longest:,}", target, 1e3 * max(times), "ms"))
                shortest = longest
        for shape, targets in OTHER_MS.items():
            for key, target in zip(("forward", "training"), targets, strict=True):
                reached = 1e3 * measured["other_shapes"][shape][name][key]
                rows.append(judged(f"mLSTM{gate}: {key}, {shape}", target, reached, "ms"))
        peak = measured["lengths"]["8192"][name]["peak_bytes"] * 1e-9
        rows.append(judged(f"mLSTM{gate}: peak memory of training, T 8,192", PEAK_GB, peak, "GB"))
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


def other_table(measured: Measurements) -> str:
    rows = []
    for shape, kinds in measured["other_shapes"].items():
        cells = [f"{row['forward'] * 1e3:.2f} / {row['training'] * 1e3:.2f}" for row in kinds.values()]
        rows.append([shape, *cells])
    return table(["ms, forward / training", *next(iter(measured["other_shapes"].values()))], rows)


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
    rows = next(iter(measured["lengths"].values()))
    if all("forward_sustained" in row for row in rows.values()):
        how = "medians of a dozen calls after a rest, peers and tfla in one run"
        sustained = "\nCall after call, where the GPU lowers its clock to stay within its power:\n\n"
        sustained += times_table(measured, "_sustained")
    else:
        how = "medians, call after call, so that the GPU lowers its clock to stay within its power; all in one run"
        sustained = ""
    page = f"""# GPU benchmarks

Written by `benchmarks/compare.py`. {about["gpu"]}, {tfla["date"]}, tfla {tfla["tfla"]}, {packages}.

{measured["total_tokens"]:,} tokens in all, {heads} heads of {dqk}/{dhv}, bfloat16, gates in float32, default chunk
size; {how}. tfla is timed through its C++ calls, recorded in a graph, training with
`keep_states`; peers through PyTorch by CUDA events. Simple GLA has no input gate and no normalizer. Peak memory: all
tensors of the call and its work space.

{times_table(measured)}{sustained}
![times over sequence length](gpu.svg)

## Other shapes, without peers
{other_table(measured)}
## Targets
{verdict_table(measured)}
## Step: 8 heads of 256/512, float32 state, one token, in a graph
{step_table(measured)}"""
    (out / "gpu.md").write_text(page)
