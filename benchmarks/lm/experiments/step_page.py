"""The section of the page about the time of a training step, with its targets."""

from __future__ import annotations

from typing import Any

TARGETS = {  # at 1.4b: how many times the time of tfla exp
    "xlstm": ("published xlstm, as it is / tfla exp", 1.25),
    "xlstm-compiled": ("published xlstm with its blocks under torch.compile / tfla exp", 1.25),
    "transformer": ("Transformer / tfla exp", 1.3),
}
REMEDIES = {
    "not_compiled": "without torch.compile",
    "not_optimized": "without LLVM's optimization of Triton kernels (DISABLE_LLVM_OPT=1)",
}


def section(part: dict[str, Any], heading: str) -> list[str]:
    from benchmarks.lm.step_time import table

    rows = [row for size in part["runs"].values() for row in size]
    lines = ["## Time of a training step", "", heading, "", table(rows), ""]
    notes = [
        f"{row['size']} {row['model']} ran {words}: {row[key]}"
        for row in rows
        for key, words in REMEDIES.items()
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
