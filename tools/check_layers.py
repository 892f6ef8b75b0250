#!/usr/bin/env python3
"""Says which folder includes what it must not, and fails if one does.

    core < plan < cpu, cuda < api < testkit < program, tests

A folder may include itself, include/tfla and what its row names. Rows hold for the folders below, unless those have a
row of their own. Besides: no cycle of folders, no folder without a row, no include that names no file.

examples:
  tools/check_layers.py            this repository
  tools/check_layers.py /tmp/tree  another one with the same folders
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PUBLIC = "include"
BELOW_BACKENDS = ("src/core", "src/plan")
BACKENDS = ("src/cpu", "src/cuda")
KERNELS = (*BELOW_BACKENDS, "src/cuda", "src/cuda/arch", "src/cuda/common")
INSIDE = (*BELOW_BACKENDS, "src/api", *BACKENDS, "src/reference", "src/testkit")

Rows = Mapping[str, tuple[str, ...]]
ROWS: Rows = {
    PUBLIC: (),
    "src/core": (),
    "src/plan": ("src/core",),
    "src/cpu": (
        *BELOW_BACKENDS,
        "src/cpu/kernels",
        "src/cpu/stages",
        "src/cpu/formulations",
        "src/cpu/delta",
        "src/cpu/conv",
    ),
    "src/cpu/kernels": BELOW_BACKENDS,
    "src/cpu/stages": (*BELOW_BACKENDS, "src/cpu", "src/cpu/kernels"),
    "src/cpu/conv": (*BELOW_BACKENDS, "src/cpu", "src/cpu/kernels"),
    "src/cpu/delta": (*BELOW_BACKENDS, "src/cpu", "src/cpu/kernels"),
    "src/cpu/ssd": (*BELOW_BACKENDS, "src/cpu", "src/cpu/kernels", "src/cpu/stages", "src/cpu/formulations"),
    "src/cpu/formulations": (*BELOW_BACKENDS, "src/cpu", "src/cpu/kernels", "src/cpu/stages"),
    "src/cuda": (*KERNELS, "src/cuda/portable", "src/cuda/sm90", "src/cuda/step"),
    "src/cuda/arch": (),
    "src/cuda/common": (*BELOW_BACKENDS, "src/cuda", "src/cuda/arch"),
    "src/cuda/portable": KERNELS,
    "src/cuda/sm90": KERNELS,
    "src/cuda/step": KERNELS,
    # Takes the place of CUDA and of src/cuda/arch, and knows no kernel.
    "src/emulator": (),
    "src/api": (*BELOW_BACKENDS, *BACKENDS),
    # Judges the library, so it knows nothing of it.
    "src/reference": (),
    "src/testkit": (*BELOW_BACKENDS, "src/api", "src/reference"),
    # Front ends. What a user of the library sees is all that bindings and examples know.
    "bindings": (),
    "examples": (),
    "cli": (*INSIDE, "cli/support"),
    "cli/support": INSIDE,
    "benchmarks": (*INSIDE, "cli/support"),
    "tests": (*INSIDE, "src/cpu/kernels", "src/cuda/arch", "src/cuda/sm90", "tests/support"),
    "tests/support": INSIDE,
}
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def folder_of(path: Path, rows: Rows) -> str | None:
    """The row that holds for a file, given from the root: that of the nearest folder."""
    return next((str(parent) for parent in path.parents if str(parent) in rows), None)


def sources(root: Path, rows: Rows) -> Iterator[Path]:
    for top in sorted({row.split("/")[0] for row in rows}):
        for path in sorted((root / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path.relative_to(root)


def target(root: Path, source: Path, named: str) -> Path | None:
    """The file that an include means, as the compiler looks for it."""
    for base in (source.parent, Path("src"), Path(PUBLIC), Path()):
        if (root / base / named).is_file():
            return Path((root / base / named).resolve().relative_to(root.resolve()))
    return None


def nested(one: str, other: str) -> bool:
    return one.startswith(other + "/") or other.startswith(one + "/")


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Each as its folders in order, the least of them first. A folder and those within it count as one here: what they
    share lies beside the door."""
    found: list[list[str]] = []

    def walk(path: list[str]) -> None:
        for next_one in sorted(edges.get(path[-1], ())):
            if nested(path[-1], next_one):
                continue
            if next_one == path[0]:
                found.append(path)
            elif next_one > path[0] and next_one not in path:
                walk([*path, next_one])

    for start in sorted(edges):
        walk([start])
    return found


def violations(root: Path, rows: Rows = ROWS) -> list[str]:
    found = []
    edges: dict[str, set[str]] = {}
    for source in sources(root, rows):
        folder = folder_of(source, rows)
        if folder is None:
            found.append(f"{source}: no row for its folder")
            continue
        for named in INCLUDE.findall((root / source).read_text()):
            included = target(root, source, named)
            if included is None:
                found.append(f'{source}: "{named}" names no file')
                continue
            other = folder_of(included, rows)
            if other is None or other in (folder, PUBLIC):
                continue  # without a row: reported for the file itself
            edges.setdefault(folder, set()).add(other)
            if other not in rows[folder]:
                found.append(f"{source}: {folder} may not include {included}")
    return found + [f"cycle: {' -> '.join([*cycle, cycle[0]])}" for cycle in cycles(edges)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent, metavar="ROOT")
    root = parser.parse_args().root
    if not (root / "src").is_dir():
        parser.error(f"ROOT was {root}; it must be a folder that has src")
    found = violations(root)
    for line in found:
        print(f"tfla: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
