"""benchmarks/operators/their_tests.py on a package of a few lines, whose tests call one function, another, or none."""

import sys
import time

import pytest

from repository import ROOT

sys.path.append(str(ROOT))

from benchmarks.operators import their_tests  # noqa: E402

FILES = {
    "peers/small/__init__.py": "",
    "peers/small/ops/__init__.py": "from small.ops.one import double, triple\n",
    "peers/small/ops/one.py": "def double(x):\n    return 7 if x == 3 else 2 * x\n\ndef triple(x):\n    return 3 * x\n",
    # A second name, in a module that is imported only by the tests, and a caller inside of the package.
    "peers/small/ops/two.py": "from small.ops.one import double as twice\n\ndef four(x):\n    return twice(twice(x))\n",
    "peers/our_small.py": """
def double(x):
    if x > 5:
        raise TypeError("ours: x | large")
    return x + x

def triple(x):
    return 4 * x
""",
    "tests/test_small.py": """
import pytest
from small.ops import triple
from small.ops.one import double
from small.ops.two import four

@pytest.mark.parametrize("x", [1, 3, 6])
def test_double(x):
    assert double(x) == 2 * x

def test_four():
    assert four(1) == 4

def test_triple():
    assert triple(2) == 6

def test_both():
    assert double(triple(1)) == 7 or double(triple(1)) == 6

def test_none():
    assert True

def test_before():
    raise RuntimeError("no device")

@pytest.mark.skip(reason="never")
def test_skipped():
    double(1)
""",
}


@pytest.fixture
def compared(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def call(only="", seconds=300.0, module="small.ops"):
        found = []
        tests = their_tests.Tests("tests/test_small.py", module, ("double", "triple"))
        runner = their_tests.Runner(tmp_path, tmp_path / "peers", time.monotonic() + seconds)
        their_tests.compared(runner, their_tests.Package("our_small", (tests,)), only, found.append)
        return found

    return call


def outcomes(found):
    return {
        name.partition("::")[2]: (entry["theirs"]["outcome"], entry["ours"]["outcome"])
        for name, entry in found["tests"].items()
    }


def test_which_pass_with_which(compared):
    double, triple = compared()
    assert outcomes(double) == {
        "test_double[1]": ("passed", "passed"),
        "test_double[3]": ("failed", "passed"),
        "test_double[6]": ("passed", "failed"),
        "test_four": ("passed", "passed"),
        "test_both": ("passed", "passed"),
    }
    # With our triple, theirs is the double that the test calls besides.
    assert outcomes(triple) == {"test_triple": ("passed", "failed"), "test_both": ("passed", "failed")}
    assert double["theirs"] == double["ours"] == ""
    text = their_tests.page([double, triple])
    assert "| test_small.py | `double` | 5 | 4 | 4 |" in text and "| test_small.py | `triple` | 2 | 2 | 0 |" in text
    assert "| test_small.py::test_double[6] | `double` | passed | failed | TypeError: ours: x \\| large |" in text
    assert (
        "| test_small.py::test_double[3] | `double` | failed | passed | " in text and "with theirs: pytest" not in text
    )
    assert "- double, with theirs: 1 tests of the file fail before they call any: RuntimeError: no device" in text


def test_ours_is_what_runs(compared):
    (double,) = compared("double")
    # Of what is replaced or may be: with --only double, triple is neither.
    calls = {side: double["tests"]["tests/test_small.py::test_both"][side]["calls"] for side in ("theirs", "ours")}
    # Theirs says 7 to 3, with which the test is content, and asks no second time.
    assert calls == {"theirs": {"double": 1}, "ours": {"double": 2}}


def test_runs_that_come_to_no_end(compared):
    (found,) = compared("double", seconds=0)
    assert found["theirs"] == "the time was up" and found["tests"] == {}
    (found,) = compared("double", module="small.gone")
    assert found["theirs"].startswith("pytest ended with ") and "small.gone" in found["theirs"]
    assert "- double, with theirs: pytest ended with " in their_tests.page([found])


@pytest.mark.parametrize("name", their_tests.PACKAGES)
def test_functions_are_ours(name):
    """What the table names is there to take their places."""
    package = their_tests.PACKAGES[name]
    module = __import__(package.ours, fromlist=["__all__"])
    named = {function for tests in package.tests for function in tests.functions}
    assert named == set(module.__all__)
