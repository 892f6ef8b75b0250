"""The tables of tools/mutations: every row still applies to the tree, and the tool notices one that does not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = """
[[mutation]]
name = "a-row"
file = "tools/mutations/README.md"
old = "# Mutations"
new = "# Changes"
suite = "cpp"
"""

pytest.importorskip("tomllib")


def mutate(*arguments: str) -> subprocess.CompletedProcess:
    words = [sys.executable, str(ROOT / "tools" / "mutate.py"), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_every_row_applies():
    result = mutate("--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("# Mutations", "# No such text", "STALE            the old text occurs 0 times in tools/mutations/README.md"),
        ('"# Mutations"', '"row"', "STALE            the old text occurs"),
        ("README.md", "README.txt", "No such file"),
        ('suite = "cpp"', 'suite = "rust"', "a-row has the suite rust; it must be one of cpp, python, cuda"),
        ('suite = "cpp"', "", "a-row has no suite"),
        ("new =", "neu =", "a-row has the unknown field neu"),
        ("# Changes", "# Mutations", "a-row changes nothing"),
        ('suite = "cpp"', 'suite = "cpp"' + ROW, "two rows are called a-row"),
    ],
)
def test_bad_row(tmp_path, old, new, sentence):
    table = tmp_path / "table.toml"
    table.write_text(ROW)
    assert mutate("--check", "--tables", str(tmp_path)).returncode == 0
    table.write_text(ROW.replace(old, new))
    result = mutate("--check", "--tables", str(tmp_path))
    assert result.returncode == 1
    assert sentence in result.stdout + result.stderr
