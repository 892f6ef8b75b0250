"""Tables of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.common.verdict import Verdict


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def verdict_table(verdicts: list[Verdict]) -> str:
    rows = ([v.what, v.target, v.measured, v.word if v.met else f"**{v.word}**"] for v in verdicts)
    return table(["what", "target", "measured", "verdict"], rows)
