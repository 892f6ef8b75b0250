"""The section of the page about associative recall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lm.experiments.common import LABELS
from benchmarks.lm.experiments.judgement import deviation, difference, grid, heading, spread
from benchmarks.lm.experiments.recall import FILE
from benchmarks.lm.experiments.results import lines

COMMAND = "python -m benchmarks.lm.experiments recall"


def read(folder: Path) -> list[dict[str, Any]]:
    """Results of one task; those of different ones are refused."""
    found = list(lines(folder / FILE).values())
    if len({json.dumps(result["task"]) for result in found}) > 1:
        raise ValueError(f"tfla: results of {folder / FILE} come from different tasks; they cannot be compared")
    return found


def section(folder: Path) -> list[str]:
    found = read(folder)
    if not found:
        return []
    task = found[0]["task"]
    rows = []
    for model, label in LABELS.items():
        mine = [result for result in found if result["model"] == model]
        if mine:
            cells = [spread([100 * result["accuracy"][str(n)] for result in mine], 1) for n in task["asked"]]
            rows.append([label, len(mine), f"{mine[0]['parameters']:,}", *cells])
    least, largest = task["forget_gate_bias"]
    text = (
        f"Rows of N pairs of a key and a value ({task['keys']} keys, {task['values']} values), then "
        f"{task['queries']} keys whose values are to be said. {task['layers']} layers, width {task['dim']}, "
        f"{task['heads']} heads; {task['steps']:,} steps of {task['batch']} rows with "
        f"{', '.join(map(str, task['trained']))} pairs in turn, peak rate {task['lr']:g}; biases of gates begin at "
        f"{task['input_gate_bias']:g} (input) and from {least:g} to {largest:g} over heads (forget). Accuracy in per "
        f"cent over {task['tests']} rows of each number of pairs, mean ± deviation over seeds; by chance among the "
        "values of a row it is 100 / N."
    )
    head = ["model", "seeds", "parameters", *(f"{n} pairs" for n in task["asked"])]
    return [
        "## Associative recall", "", heading(found[0]["about"], [COMMAND]), "", text, "", *grid(head, rows),
        "![accuracy over pairs](recall.png)", "", *(f"- {line}" for line in follows(found)), "",
    ]  # fmt: skip


def follows(found: list[dict[str, Any]]) -> list[str]:
    """For every number of pairs whether mLSTMsig and mLSTMexp differ by more than their seeds."""
    shown, held = [], []
    for pairs in found[0]["task"]["asked"]:
        by_model = {
            model: {
                result["seed"]: 100 * result["accuracy"][str(pairs)] for result in found if result["model"] == model
            }
            for model in LABELS
        }
        gap = difference(by_model["sigmoid"], by_model["exp"])
        if gap is None or gap.deviation is None:
            return ["One seed of each model; nothing follows, as one seed has no spread."]
        text = f"{pairs} pairs {gap.mean:+.1f} ± {gap.margin:.1f}"
        (shown if gap.shown else held).append(text)
    both = (
        f"{LABELS['sigmoid']} minus {LABELS['exp']} in per cent of accuracy with its 95 % interval, by seeds in pairs"
    )
    lines = []
    if shown:
        lines.append(f"{both}, where it excludes 0: {'; '.join(shown)}.")
    if held:
        lines.append(f"{both}, where it holds 0, so that no difference follows: {'; '.join(held)}.")
    lines.append(unsolved(found))
    return [line for line in lines if line]


def unsolved(found: list[dict[str, Any]]) -> str:
    """Which models have not learnt the task at the fewest pairs, so that their rows say nothing about memory."""
    fewest = str(min(found[0]["task"]["asked"]))
    names = []
    for model, label in LABELS.items():
        values = [100 * result["accuracy"][fewest] for result in found if result["model"] == model]
        if values and min(values) < 90:
            names.append(f"{label} ({spread(values, 1)})" if deviation(values) is not None else label)
    if not names:
        return ""
    return (
        f"{' and '.join(names)} stay below 90 % of {fewest} pairs with some seed: what limits them there is how fast "
        "they learn, so nothing follows about how much they can hold."
    )
