#!/usr/bin/env python3
"""Runs a CUDA compiler and fails where a kernel spills registers that no line of a list allows, where ptxas serializes
wgmma products (its notes C75xx), or where it ignores setmaxnreg.

usage: check_spills.py LIST COMMAND...     COMMAND compiles with -Xptxas=-v

A line of the list: a pattern for the mangled kernel name, the most bytes it may spill, and the reason.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(r"ptxas info\s+: Compiling entry function '(\w+)' for '(\w+)'")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SLOWED = re.compile(r"\(C75\d\d\)|'?setmaxnreg'? ignored")
CHATTER = re.compile(r"^(ptxas info\s+:|\s+\d+ bytes stack frame|Function properties|\s*$)")


def allowances(path: Path) -> list[tuple[re.Pattern[str], int]]:
    rows = []
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern, most, reason = line.split(maxsplit=2)
        if not reason:
            raise SystemExit(f"check_spills: {path}: {pattern} has no reason")
        rows.append((re.compile(pattern), int(most)))
    return rows


def main() -> int:
    allowed = allowances(Path(sys.argv[1]))
    run = subprocess.run(sys.argv[2:], stderr=subprocess.PIPE, text=True, check=False)
    kernel, arch, bad = "", "", []
    for line in run.stderr.splitlines():
        if entry := ENTRY.search(line):
            kernel, arch = entry.groups()
        elif spill := SPILL.search(line):
            spilled = max(int(spill[2]), int(spill[3]))
            most = max((most for pattern, most in allowed if pattern.search(kernel)), default=0)
            if spilled > most:
                bad.append(f"{kernel} for {arch} spills {spilled} bytes; {sys.argv[1]} allows {most}")
        if SLOWED.search(line):
            bad.append(f"{kernel} for {arch}: {line.strip()}")
        if not CHATTER.match(line):
            print(line, file=sys.stderr)
    for sentence in bad:
        print(f"check_spills: {sentence}", file=sys.stderr)
    return run.returncode or (1 if bad else 0)


if __name__ == "__main__":
    sys.exit(main())
