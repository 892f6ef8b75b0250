#!/usr/bin/env python3
"""How large the pieces of the house are: the longest functions of src, the longest pages, the folders with most files.

Functions are found by their braces: a block at the level of a namespace or a class whose head has a parameter list.

examples:
  tools/measure_house.py             the five largest of each
  tools/measure_house.py --most 20   more of them
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {".h", ".cc", ".cu", ".cuh"}
NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
NAME = re.compile(r"([~\w]+)\s*\(")
NOT_NAMES = {"__launch_bounds__", "requires", "noexcept", "alignas"}
SCOPE = re.compile(r"\b(namespace|struct|class|enum|union|extern)\b[^()]*$")


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """(lines, name) of every function."""
    text = NOISE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())
    text = re.sub(r"^\s*#[^\n]*(?:\\\n[^\n]*)*", lambda match: "\n" * match[0].count("\n"), text, flags=re.MULTILINE)
    scopes: list[bool] = []  # of open braces: whether it is a namespace or a class
    start = 0
    opened: tuple[int, int, str] | None = None  # depth, line, name of the function that is open
    for at, letter in enumerate(text):
        if letter == ";":
            start = at + 1
        elif letter == "{":
            head = text[start:at]
            is_scope = bool(SCOPE.search(head)) and "(" not in head.split("class")[-1].split("struct")[-1]
            if opened is None and not is_scope and ")" in head and "asm" not in head and all(scopes):
                name = next((word for word in NAME.findall(head) if word not in NOT_NAMES), "?")
                line = text.count("\n", 0, start + len(head) - len(head.lstrip()))
                opened = (len(scopes), line, name)
            scopes.append(is_scope)
            start = at + 1
        elif letter == "}" and scopes:
            scopes.pop()
            if opened and opened[0] == len(scopes):
                yield text.count("\n", 0, at) - opened[1] + 1, opened[2]
                opened = None
            start = at + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=5, help="rows of each table (default 5)")
    most = parser.parse_args().most
    sources = [path for path in sorted((ROOT / "src").rglob("*")) if path.suffix in SOURCES]
    found = sorted(
        ((*function, path.relative_to(ROOT)) for path in sources for function in functions(path)), reverse=True
    )
    print(f"longest of {len(found)} functions in src")
    for lines, name, path in found[:most]:
        print(f"{lines:6} {name}  {path}")
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "notebook" not in path.parts]
    lengths = sorted(((len(page.read_text().splitlines()), page.relative_to(ROOT)) for page in pages), reverse=True)
    print(f"longest of {len(lengths)} pages")
    for lines, page in lengths[:most]:
        print(f"{lines:6} {page}")
    code = [
        path
        for top in ("src", "cli", "tests", "benchmarks")
        for path in sorted((ROOT / top).rglob("*"))
        if path.is_file()
    ]
    folders = Counter(path.parent.relative_to(ROOT) for path in code if path.suffix in SOURCES | {".py"})
    print("folders with most files")
    for folder, count in folders.most_common(most):
        print(f"{count:6} {folder}")


if __name__ == "__main__":
    main()
