#!/usr/bin/env python3
"""Compares the machine code of every CUDA kernel in two builds.

Kernels are matched by their instructions, not by their names: a renamed or moved kernel with the same instructions is
the same kernel. What is printed are the kernels of each side whose instructions the other side does not have. The exit
status is 0 where there are none, else 1.

It needs cuobjdump: the CUDA toolkit has it, and so has the package triton (in backends/nvidia/bin).

examples:
  tools/same_code.py build/before build/cuda          two build folders: every object file below them
  tools/same_code.py old/forward.cu.o new/forward.cu.o
"""

import argparse
import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TEXT = ".text."


def tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found is None:
        sys.exit(f"tfla: {name} is not in PATH; the CUDA toolkit or the package triton has it")
    return found


def objects(place: Path) -> list[Path]:
    if not place.exists():
        sys.exit(f"tfla: {place} does not exist; it must be an object file or a build folder")
    return sorted(place.rglob("*.cu.o")) if place.is_dir() else [place]


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and contents of every section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + number * size) for number in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, length in headers:
        start = names + name
        nothing = 8  # SHT_NOBITS: a section that takes no room in the file
        yield elf[start : elf.index(0, start)].decode(), b"" if kind == nothing else elf[offset : offset + length]


def kernels(path: Path) -> Iterator[tuple[str, str, str]]:
    """(architecture, mangled name, digest of the instructions) of every kernel in an object file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool("cuobjdump"), "-xelf", "all", path.resolve()], cwd=folder, capture_output=True, check=True)
        for cubin in sorted(Path(folder).iterdir()):
            architecture = cubin.name.split(".")[-2]
            for name, code in sections(cubin.read_bytes()):
                if name.startswith(TEXT):
                    yield architecture, name.removeprefix(TEXT), hashlib.sha256(code).hexdigest()


def build(place: Path) -> dict[tuple[str, str], list[str]]:
    """Names of the kernels of a build by architecture and digest."""
    table: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in objects(place):
        for architecture, name, digest in kernels(path):
            table[architecture, digest].append(name)
    return table


def readable(names: list[str]) -> list[str]:
    if not names:
        return []
    return subprocess.run([tool("c++filt"), *names], capture_output=True, text=True, check=True).stdout.splitlines()


def report(side: str, mine: dict, other: dict) -> int:
    """Prints the kernels of one side that the other one lacks: of equal ones, those that it has fewer of."""
    rows = []
    for key, names in mine.items():
        missing = len(names) - len(other.get(key, []))
        if missing > 0:
            rows += [(key[0], name) for name in sorted(names)[:missing]]
    rows.sort()
    for (architecture, _), name in zip(rows, readable([name for _, name in rows]), strict=True):
        print(f"only {side}  {architecture}  {name}")
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="an object file, or a folder with .cu.o files below it")
    parser.add_argument("new", type=Path, help="the same of the other build")
    arguments = parser.parse_args()
    old, new = (build(place) for place in (arguments.old, arguments.new))
    counts = [sum(map(len, table.values())) for table in (old, new)]
    if 0 in counts:
        sys.exit(f"tfla: {arguments.old if counts[0] == 0 else arguments.new} has no kernels")
    differing = report("old", old, new) + report("new", new, old)
    print(f"{counts[0]} kernels before, {counts[1]} after; {differing} without a counterpart")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
