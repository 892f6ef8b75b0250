"""The page of benchmarks/lm/generation.py from its JSON file."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.common.markdown import table, verdict_table
from benchmarks.common.verdict import Verdict

FASTER = 3.0  # than the published packages
SHARE = 0.6  # of a copy's speed, on a CPU
HEAD = """# Generation

Milliseconds a token through `tfla.lm.generate.generate`, as `python -m tfla.lm generate` has it, until the tokens are
on the host. The floor is what reading every weight once, and reading and writing every state, takes at the speed of a
copy on the same device in the same run. Sampled: temperature 0.8, top-p 0.95. Weights are random.
"""
FOOT = (
    "`PYTHONPATH=python python -m benchmarks.lm.generation` writes this page and [generation.json](generation.json).\n"
)


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) else str(value)


def name(row: dict[str, Any]) -> str:
    return f"{row['size']}, {row['dtype']}, batch {row['batch']}"


def verdicts(kind: str, result: dict[str, Any]) -> list[Verdict]:
    found = []
    for row in result["rows"]:
        if row["target"] is not None:
            measured = row["greedy_ms"]
            found.append(
                Verdict(name(row), f"{row['target']:.1f} ms", f"{measured:.2f} ms", round(measured, 2) <= row["target"])
            )
        if kind == "cpu":
            share = row["floor_ms"] / row["greedy_ms"]
            found.append(Verdict(f"{name(row)}: of a copy's speed", f"{SHARE:.0%}", f"{share:.0%}", share >= SHARE))
        for peer, took in (row.get("peers_ms") or {}).items() if kind == "cuda" else ():
            what = f"{name(row)}: faster than {peer}"
            if isinstance(took, str):
                found.append(Verdict(what, f"{FASTER:.0f} times", "not measured", met=False, open=True))
            else:
                times = took / row["greedy_ms"]
                found.append(Verdict(what, f"{FASTER:.0f} times", f"{times:.1f} times", times >= FASTER))
    return found


def section(kind: str, result: dict[str, Any]) -> str:
    made = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    where = result["device"] + (f", {result['threads']} threads" if kind == "cpu" else "")
    about = (
        f"{where}, {result['date']}; {made}. Before it began, other processes took {result['busy']:.0%} of the cores."
    )
    rows = [
        [
            name(row), _number(row["floor_ms"]), _number(row["greedy_ms"]), f"{row['floor_ms'] / row['greedy_ms']:.0%}",
            _number(row["sampled_ms"]), f"{row['copy_bytes_per_second'] / 1e9:,.0f} GB/s",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    parts = [
        f"## {'On a GPU' if kind == 'cuda' else 'On a CPU'}\n\n" + "\n".join(textwrap.wrap(about, 128)) + "\n",
        table(["model", "floor, ms", "greedy, ms", "floor / greedy", "sampled, ms", "copy"], rows),
    ]
    peers = [
        [name(row), peer, _number(took), "" if isinstance(took, str) else f"{took / row['greedy_ms']:.1f}"]
        for row in result["rows"]
        for peer, took in (row.get("peers_ms") or {}).items()
    ]
    if peers:
        parts.append(table(["model", "peer", "ms a token", "times tfla's"], peers))
    if result["prefill"]:
        p = result["prefill"]
        parts.append(
            f"Prefill of {p['batch']} x {p['tokens']:,} tokens, {p['size']}: {p['ms']:.0f} ms, "
            f"{p['product_flops_per_second'] / 1e12:.0f} TFLOP/s of its layers' matrix products alone.\n"
        )
    found = verdicts(kind, result)
    if found:
        parts.append(verdict_table(found))
    return "\n".join(parts)


def page(results: dict[str, Any]) -> str:
    sections = [section(kind, results[kind]) for kind in ("cuda", "cpu") if kind in results]
    return "\n".join([HEAD, *sections, FOOT])
