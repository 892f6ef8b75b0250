"""The page of what beside.py measured: verdicts first, then times, then why some are missing."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.markdown import table, verdict_table
from benchmarks.operators.beside import Case, Content, Row, Suite
from benchmarks.operators.goals import COPIED, OURS, best_peer, judge, ratio, seconds

HEADS = {False: "## Whole sequences\n", True: "## Steps\n"}


def duration(value: float) -> str:
    return f"{value * 1e3:.3f} ms" if value >= 1e-4 else f"{value * 1e6:.2f} us"


def cell(row: Row, side: str, marks: dict[str, int]) -> str:
    found = seconds(row, side)
    if found:
        return duration(median(found))
    reason = row["sides"].get(side, {}).get("error")
    return f"none [{marks.setdefault(f'{side}: {reason}', len(marks) + 1)}]" if reason else ""


def results(cases: list[Case], rows: dict[str, Row], marks: dict[str, int]) -> str:
    """One table of sequences, one of steps; a column for everyone who has a row in it."""
    text = []
    for steps, head in HEADS.items():
        chosen = [case for case in cases if (case.problem.operation == "step") == steps and str(case) in rows]
        names = list(dict.fromkeys(name for case in chosen for name in case.sides))
        lines = []
        for case in chosen:
            row = rows[str(case)]
            peer, ours = best_peer(row), seconds(row, OURS)
            faster = f"{ratio(seconds(row, peer), ours):.2f}" if peer and ours else ""
            copied = [f"{ratio(seconds(row, COPIED), ours):.0%}" if ours and seconds(row, COPIED) else ""]
            lines.append([str(case), *(cell(row, name, marks) for name in names), faster, *(copied if steps else [])])
        if lines:
            last = ["times faster", *(["of the copy speed"] if steps else [])]
            text.append(head + "\n" + table(["work", *names, *last], lines))
    return "\n".join(text)


def about_line(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in about.get("packages", {}).items())
    return (
        f"{about.get('device', 'no device')}, {about['date']}; tfla {about.get('tfla', '')}, {packages}, Python "
        f"{about.get('python', '')}, CUDA {about.get('cuda', '')}."
    )


HOW = """bfloat16, all through PyTorch, by CUDA events. A time is the median of bursts of a dozen calls after a rest, of
{rounds} rounds, in which all sides have their turns in one process. Training is forward and all gradients. Steps are
calls in a CUDA graph, and "copy" copies as many bytes as their states have in the same way. Before anyone is timed, a
slice of its results is compared with float64, token by token; a result that is wrong has no time. A ratio is the median
of those of the rounds."""


def page(suite: Suite, content: Content) -> str:
    about, rows, marks = content["about"], content["rows"], dict[str, int]()
    cases = suite.cases()
    finished = {name: row for name, row in rows.items() if row.get("done")}
    verdicts = judge(cases, finished, "not measured")
    met = sum(verdict.met for verdict in verdicts)
    missing = [str(case) for case in cases if str(case) not in finished]

    def filled(text: str) -> str:
        return textwrap.fill(" ".join(text.split()), 130, break_on_hyphens=False, break_long_words=False) + "\n"

    parts = [f"# {suite.title}\n", filled(about_line(about)), f"## Targets: {met} of {len(verdicts)} met\n"]
    parts += [verdict_table(verdicts), results(cases, finished, marks)]
    if marks:
        parts.append("".join(f"- [{number}] {reason}\n" for reason, number in marks.items()))
    if missing:
        parts.append("Not measured:\n\n" + "".join(f"- {name}\n" for name in missing))
    parts += ["## How it was measured\n", filled(suite.about), filled(HOW.format(rounds=about["rounds"]))]
    parts.append(f"`python -m {suite.module}` writes this page and [{suite.name}.json]({suite.name}.json).\n")
    return "\n".join(parts)


def write(suite: Suite, file: Path) -> None:
    text = page(suite, json.loads(file.read_text()))
    file.with_suffix(".md").write_text(text)
    print(text)
    print(f"written: {file.with_suffix('.md')}, {file}")
