"""Writes the benchmark page: tables from measurements, never by hand, and the plot."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  the backend has to be chosen first

from benchmarks.common.markdown import table, verdict_table  # noqa: E402
from benchmarks.common.verdict import Verdict  # noqa: E402
from benchmarks.cpu import targets  # noqa: E402

Measurements = dict[str, Any]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def middle(rounds: list[dict[str, Any]], key: str) -> float:
    return float(median(row[key] for row in rounds))


def compare_table(measured: Measurements) -> str:
    rows = []
    for case in measured["compare"]:
        rounds = case["rounds"]
        share = targets.over_rounds(rounds, lambda row: row["tfla_flops"] / row["product_flops"])
        rows.append(
            [
                targets.LABEL[case["operation"]],
                f"{case['tokens']:,}",
                milliseconds(middle(rounds, "peer_seconds")),
                case["peer_setting"],
                milliseconds(middle(rounds, "tfla_seconds")),
                f"{targets.speedup(rounds):.2f}",
                f"{middle(rounds, 'tfla_flops') / 1e9:.1f}",
                f"{share:.0%}",
                milliseconds(middle(rounds, "tfla_bfloat16_seconds")),
            ]
        )
    head = ["operation", "T", "mlstm_kernels", "its best setting", "tfla", "times faster", "tfla GFLOP/s"]
    return table([*head, "of product", "tfla bfloat16"], rows)


def growth_table(measured: Measurements) -> str:
    rows = []
    for operation in targets.OPERATIONS:
        data = measured["growth"][operation]
        times = targets.fastest(data["turns"])
        first = next(seconds / count for count, seconds in times.items())
        for count, seconds in times.items():
            rows.append(
                [
                    targets.LABEL[operation],
                    f"{count:,}",
                    milliseconds(seconds),
                    f"{seconds / count * 1e6:.3g} us",
                    f"{seconds / count / first:.2f}",
                    f"{data['scratch_share'][str(count)]:.1%}",
                ]
            )
    return table(["operation", "T", "time", "per token", "over linear", "scratch of inputs and outputs"], rows)


def step_table(measured: Measurements) -> str:
    rows = []
    for case in measured["step"]:
        rounds = case["rounds"]
        share = targets.over_rounds(rounds, lambda row: row["state_rate"] / row["copy_rate"])
        rows.append(
            [
                str(case["batch"]),
                milliseconds(middle(rounds, "peer_seconds")),
                milliseconds(middle(rounds, "tfla_seconds")),
                f"{targets.speedup(rounds):.2f}",
                f"{middle(rounds, 'state_rate') / 1e9:.1f}",
                f"{middle(rounds, 'copy_rate') / 1e9:.1f}",
                f"{share:.0%}",
            ]
        )
    return table(["batch", "mlstm_kernels", "tfla", "times faster", "state GB/s", "copy GB/s", "of copy"], rows)


def machine_list(measured: Measurements) -> str:
    about = measured["about"]
    lines = [
        f"- {about['cpu']}, {about['cores']} cores, {about['threads']} threads used by both sides",
        f"- tfla {about['tfla']} ({about['compiler']}); products to compare with by {about['blas']}",
        f"- mlstm_kernels {about['mlstm_kernels']} on torch {about['torch']}, Python {about['python']}",
        f"- {about['date']}; {about['rounds']} rounds, in each of which both sides have a short turn on every case;\n"
        "  times and ratios are medians over the rounds unless a table says otherwise, ratios formed inside a round",
        f"- other processes used {about['busy_before']:.0%} of the cores just before the run",
    ]
    return "\n".join(lines) + "\n"


def page(measured: Measurements, verdicts: list[Verdict]) -> str:
    met = sum(verdict.met for verdict in verdicts)
    size = "batch {batch}, {heads} heads, dqk {dqk}, dhv {dhv}".format(**measured["shape"])
    step = "{heads} heads, dqk {dqk}, dhv {dhv}".format(**measured["step_shape"])
    parts = [
        "# CPU benchmarks\n",
        "Written by `make bench` (benchmarks/cpu/compare.py); the numbers are in [cpu.json](cpu.json).\n",
        machine_list(measured),
        f"## Targets: {met} of {len(verdicts)} met\n",
        verdict_table(verdicts),
        "## tfla and mlstm_kernels\n",
        f"float32, {size}, gates i from N(-4, 1) and f from N(4.5, 1). Native PyTorch kernels with the kernel and\n"
        "chunk size that are fastest here, against tfla at its default chunk size. GFLOP/s count useful operations\n"
        "only (the causal half); one large float32 product on every thread reaches\n"
        f"{measured['product_flops'] / 1e9:.1f} GFLOP/s by OpenBLAS.\n",
        compare_table(measured),
        "![time over sequence length](cpu.png)\n",
        "## Growth with the sequence\n",
        "Lengths are timed in turns, and a sample of each of them is as long as one call on the longest sequence:\n"
        "calls on short ones follow each other until then. Times are the fastest samples of all turns: other work on\n"
        "the machine only adds to them, and meets every length alike.\n",
        growth_table(measured),
        "## Decoding\n",
        f"One token per sequence, {step}, float32 state. State traffic is C and n read and written once; the copy\n"
        "moves as many bytes between two buffers of that size with the same threads.\n",
        step_table(measured),
    ]
    return "\n".join(parts)


def longer_times(turns: list[dict[str, Any]], after: int) -> dict[int, float]:
    """Median seconds of the lengths that were not compared."""
    tokens = {int(key) for turn in turns for key in turn if int(key) > after}
    return {count: median(turn[str(count)]["median"] for turn in turns if str(count) in turn) for count in tokens}


def plot(measured: Measurements, stem: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, operation in zip(axes, targets.OPERATIONS, strict=True):
        cases = [case for case in measured["compare"] if case["operation"] == operation]
        times = {case["tokens"]: middle(case["rounds"], "tfla_seconds") for case in cases}
        times |= longer_times(measured["growth"][operation]["turns"], after=max(times))
        peer = {case["tokens"]: middle(case["rounds"], "peer_seconds") for case in cases}
        for label, series, marker in (("mlstm_kernels (native)", peer, "s"), ("tfla", times, "o")):
            tokens = sorted(series)
            axis.loglog(tokens, [series[count] * 1e3 for count in tokens], marker=marker, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(times), [f"{count:,}" for count in sorted(times)], rotation=30)
        axis.set_title(targets.LABEL[operation])
        axis.set_xlabel("T")
        axis.grid(True, which="major", alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("ms")
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix), dpi=150)
    plt.close(figure)
