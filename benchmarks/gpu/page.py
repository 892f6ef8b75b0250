"""Writes docs/benchmarks/gpu.{json,md} and the plots from what compare.py measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table, verdict_table
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import plot as gpu_plot
from benchmarks.gpu import targets as gpu_targets
from benchmarks.paper.model import Workload

Row = dict[str, Any]
Case = dict[str, Any]
Cases = dict[str, Case]
PLOTS = {"lengths": "gpu", "sweep": "gpu_sweep", "attention": "gpu_attention"}


def work(case: Case) -> Workload:
    return Workload(*case["workload"])


def ordered(cases: Cases) -> list[Case]:
    return sorted(cases.values(), key=lambda case: (work(case).tokens, work(case).dqk))


def names(cases: Cases) -> list[str]:
    return list(dict.fromkeys(name for case in cases.values() for name in case["rows"]))


def time_cell(row: Row, operation: str, kind: str) -> str:
    if operation + kind in row:
        return f"{1e3 * row[operation + kind]:.2f}" + ("\\*" if f"{operation}_note" in row else "")
    if f"{operation}_skipped" in row:
        return "-"
    return "fails" if f"{operation}_error" in row else ""


def times_cell(row: Row, kind: str = "") -> str:
    cells = [time_cell(row, operation, kind) for operation in ("forward", "training")]
    return " / ".join(cells) if any(cells) else ""


def by_column(cases: Cases, head: list[str], kind: str = "", peak: bool = False) -> str:
    """A line per implementation, a column per case."""
    lines = []
    for name in names(cases):
        rows = [case["rows"].get(name, {}) for case in ordered(cases)]
        cells = [times_cell(row, kind) for row in rows]
        peaks = [row["peak_bytes"] for row in rows if "peak_bytes" in row]
        lines.append([name, *cells, *([f"{max(peaks) / 1e9:.2f}" if peaks else ""] if peak else [])])
    return table(["ms, forward / training", *head, *(["peak GB"] if peak else [])], lines)


def remarks(cases: Cases) -> str:
    """Why a row has a mark, or none of its times."""
    found: dict[str, None] = {}
    for case in cases.values():
        for name, row in case["rows"].items():
            if note := row.get("training_note"):
                found[f"\\* {name}: {note}."] = None
            if row.get("without_llvm"):
                found[f"{name}: compiled without LLVM's passes, in which Triton aborts."] = None
            errors = {operation: row.get(f"{operation}_error") for operation in ("forward", "training")}
            if errors["forward"] is not None and errors["forward"] == errors["training"]:
                errors = {"forward and training": errors["forward"]}
            for operation, error in errors.items():
                if error is not None:
                    found[f"{name}, {operation}: {error.rstrip('.')}."] = None
    return "".join(f"- {line}\n" for line in found)


def lengths_section(cases: Cases) -> str:
    head = [f"T {work(case).tokens:,}" for case in ordered(cases)]
    text = f"""## Sequence lengths

{gpu_parts.TOTAL_TOKENS:,} tokens in all, 16 heads of 128/256; medians of a dozen calls after a rest (fewer of calls
above 20 ms).

{by_column(cases, head, peak=True)}
Call after call, where the GPU lowers its clock to stay within its power:

{by_column(cases, head, "_sustained")}
{remarks(cases)}
![times over sequence length](gpu.svg)
"""
    return text


def shapes_section(cases: Cases) -> str:
    head = [gpu_parts.label(work(case)) for case in ordered(cases)]
    return f"## Wide heads, few heads\n\n{by_column(cases, head)}\n{remarks(cases)}"


def sweep_section(cases: Cases) -> str:
    head = [f"{work(case).heads} of {work(case).dqk}" for case in ordered(cases)]
    one = work(ordered(cases)[0])
    return f"""## Head dimensions

Batch {one.batch}, T {one.tokens:,}, width {gpu_parts.SWEEP_WIDTH:,}: heads of dqk = dhv.

{by_column(cases, head)}
{remarks(cases)}
![times over head dimension](gpu_sweep.svg)
"""


def attention_section(cases: Cases) -> str:
    head = [f"T {work(case).tokens:,}" for case in ordered(cases)]
    longest = 1e3 * gpu_parts.MOST_ATTENTION_SECONDS
    return f"""## Against attention

PyTorch's `scaled_dot_product_attention` by cuDNN, causal, bfloat16, {gpu_parts.ATTENTION_HEADS} heads of
{gpu_parts.ATTENTION_DIM}, beside 16 heads of 128/256: the same width, {gpu_parts.TOTAL_TOKENS:,} tokens in all. A
dash: not timed, since twice the time at half the length is above {longest:.0f} ms.

{by_column(cases, head)}
{remarks(cases)}
![times over sequence length, with attention](gpu_attention.svg)
"""


def memory_section(cases: Cases) -> str:
    lines = []
    for case in cases.values():
        chunk = f"{case['chunk']:,}" if case["chunk"] else "the default"
        for name, row in case["rows"].items():
            peak = f"{row['peak_bytes'] / 1e9:.3f}" if "peak_bytes" in row else "fails"
            lines.append([name, chunk, peak, time_cell(row, "training", "")])
    text = f"{gpu_parts.label(work(next(iter(cases.values()))))}.\n\n"
    return f"## Memory of training\n\n{text}{table(['', 'chunk', 'peak GB', 'training ms'], lines)}"


def step_section(cases: Cases) -> str:
    lines = []
    for case in sorted(cases.values(), key=lambda case: case["batch"]):
        own, peer = case["rows"]["tfla"], case["rows"].get(gpu_parts.STEP_PEER, {})
        theirs = f"{peer['seconds'] * 1e6:.2f}" if "seconds" in peer else "fails" if "seconds_error" in peer else ""
        rates = [own["bytes_per_second"], case["copy_bytes_per_second"]]
        lines.append([f"{case['batch']}", f"{own['seconds'] * 1e6:.2f}", *(f"{r / 1e12:.2f}" for r in rates), theirs])
    head = ["batch", "tfla us", "TB/s on the state", "copy TB/s", "mlstm_kernels us"]
    return f"## Step: 8 heads of 256/512, float32 state, one token, in a graph\n\n{table(head, lines)}"


SECTIONS = {
    "lengths": lengths_section,
    "shapes": shapes_section,
    "sweep": sweep_section,
    "attention": attention_section,
    "memory": memory_section,
    "step": step_section,
}


def run_line(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return f"- {about['date']}: {', '.join(about['parts'])}; tfla {about['tfla']}, {packages}"


def page(measured: dict[str, Any]) -> str:
    """Verdicts first, then the numbers behind them, and which runs they are from last."""
    parts: dict[str, Cases] = measured["parts"]
    verdicts = gpu_targets.judge(parts)
    met = sum(verdict.met for verdict in verdicts)
    missing = [part for part in SECTIONS if part not in parts]
    text = [
        "# GPU benchmarks\n",
        f"{measured['runs'][0]['gpu']}; the numbers are in [gpu.json](gpu.json), how and when they were measured is\n"
        "[below](#how-it-was-measured).\n",
        f"## Targets: {met} of {len(verdicts)} met\n",
        verdict_table(verdicts),
        *(SECTIONS[part](parts[part]) for part in SECTIONS if part in parts),
    ]
    if missing:
        text.append(f"Not measured: {', '.join(missing)}.\n")
    text += [
        "## How it was measured\n",
        "bfloat16, gates in float32, default chunk size unless said; peers and tfla of one column in one run. tfla is\n"
        "timed through its C++ calls, recorded in a graph, training with states kept; peers through PyTorch by CUDA\n"
        "events, each in a process of its own. Times are medians of a burst after a rest, unless said to be call\n"
        "after call. Simple GLA has no input gate and no normalizer. Peak memory: all tensors of the call and its\n"
        "work space. tfla portable: by the kernels that every GPU from sm_80 on runs, instead of Hopper's.\n",
        "`benchmarks/gpu/compare.py` writes this page. A later run replaces the cases that it measures again:\n",
        "\n".join(run_line(about) for about in measured["runs"]) + "\n",
    ]
    return "\n".join(text)


def write(measured: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Cases] = measured["parts"]
    gpu = measured["runs"][0]["gpu"]
    plots = {
        "lengths": ("16 heads of 128/256", "sequence length T, 65,536 tokens in all", lambda w: w.tokens, False),
        "sweep": ("width 4,096, T 8,192, batch 4", "head dimension", lambda w: w.dqk, False),
        "attention": ("16 heads of 128/256, attention 32 of 128", "sequence length T", lambda w: w.tokens, True),
    }
    for part, (title, label, x, log) in plots.items():
        if part in parts:
            points = [(x(work(case)), case["rows"]) for case in parts[part].values()]
            gpu_plot.curves(points, f"{gpu}, bfloat16, {title}", label, out / PLOTS[part], log)
    (out / "gpu.json").write_text(json.dumps(measured, indent=1) + "\n")
    (out / "gpu.md").write_text(page(measured))
