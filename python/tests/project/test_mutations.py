"""The tables of tools/mutations: every row still applies to the tree. And the tool that makes the changes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

TOOL = ROOT / "tools" / "mutate.py"
ROW = """
[[mutation]]
name = "a-row"
file = "tools/mutations/README.md"
old = "# Mutations"
new = "# Changes"
suite = "cpp"
"""

pytest.importorskip("tomllib")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_row_applies():
    result = run("--check")
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
    assert run("--check", "--tables", str(tmp_path)).returncode == 0
    table.write_text(ROW.replace(old, new))
    result = run("--check", "--tables", str(tmp_path))
    assert result.returncode == 1
    assert sentence in result.stdout + result.stderr


# A test that looks for a 2, in a file that holds 1 + 1 or what a mutation makes of it.
JUDGE = "import sys, time; x = eval(open('sum.txt').read()); time.sleep(60 * (x == 3)); sys.exit(x != 2)"


@pytest.mark.parametrize(
    ("new", "survives", "word", "why"),
    [
        ("1 - 1", "", "killed", "the judge"),
        ("2 * 1", "", "SURVIVED", ""),
        ("2 * 1", "it is the same", "survives", "it is the same"),
        ("1 - 1", "it is the same", "EXPLAINED IN VAIN", "the judge kills it"),
        ("1 + 2", "", "killed", "nothing but time"),
        ("1 +", "", "DID NOT COMPILE", "error: it ends too early"),
    ],
)
def test_verdict(mutate, monkeypatch, tmp_path, new, survives, word, why):
    class Suite:
        def build(self, tree, jobs):
            return "error: it ends too early" if (tree / "sum.txt").read_text().endswith("+") else ""

        def commands(self, tree, tests, jobs):
            return [mutate.Command([sys.executable, "-c", JUDGE], {}, tree)] * jobs

        def killer(self, output):
            return "the judge"

    monkeypatch.setitem(mutate.SUITES, "cpp", Suite())
    (tmp_path / "sum.txt").write_text("1 + 1")
    row = mutate.Row("row", "sum.txt", "1 + 1", new, "cpp", survives=survives)
    verdict = mutate.judge(row, tmp_path, jobs=2, seconds=2 if new == "1 + 2" else 60)
    assert (verdict.word, verdict.why[: len(why)]) == (word, why)
    assert verdict.bad == word.isupper()
    assert (tmp_path / "sum.txt").read_text() == "1 + 1"


@pytest.mark.parametrize(
    ("suite", "output", "killer"),
    [
        (
            "cpp",
            "[ RUN      ] A.b\n[       OK ] A.b (0 ms)\n[ RUN      ] A/c.d/0\n[  FAILED  ] A/c.d/0, where\n",
            "A/c.d/0",
        ),
        ("cpp", "[ RUN      ] A.b\n[       OK ] A.b (0 ms)\n[ RUN      ] A.c\n", "A.c (it crashed)"),
        (
            "python",
            "F\nFAILED ../python/tests/test_a.py::test_b[c] - assert 1 == 2\n1 failed\n",
            "test_a.py::test_b[c]",
        ),
        ("python", "ERROR test_a.py\n1 error\n", "test_a.py"),
    ],
)
def test_who_noticed(mutate, suite, output, killer):
    assert mutate.SUITES[suite].killer(output) == killer


def test_tests_are_named_without_their_folders(mutate):
    names = ("test_mutations.py", "test_step.py::test_slots")
    (command,) = mutate.SUITES["python"].commands(ROOT, names, 1)
    files = [word.partition("::") for word in command.words[-2:]]
    assert [Path(file).is_file() for file, *_ in files] == [True, True]
    assert [Path(file).name + "".join(rest) for file, *rest in files] == list(names)


def test_copy_follows_the_tree(mutate, monkeypatch, tmp_path):
    """Files that are equal keep their times, changed ones are taken anew, and those that are gone are removed."""
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    tree.mkdir()
    subprocess.run(["git", "init", "--quiet", str(tree)], check=True)
    monkeypatch.setattr(mutate, "ROOT", tree)
    for name in ("same", "changed", "gone"):
        (tree / name).write_text(name)
    mutate.copy_tree(copy)
    (copy / "built").write_text("stays")
    (copy / "changed").write_text("by a run that was interrupted")
    (tree / "gone").unlink()
    before = (copy / "same").stat().st_mtime_ns
    mutate.copy_tree(copy)
    assert sorted(path.name for path in copy.iterdir()) == ["built", "changed", "same"]
    assert (copy / "changed").read_text() == "changed"
    assert (copy / "same").stat().st_mtime_ns == before
