"""tools/count_tests.py on reports as ctest and pytest write them."""

import subprocess
import sys

import pytest

from repository import ROOT

TOOL = ROOT / "tools" / "count_tests.py"


def ctest(message: str, printed: str = "") -> str:
    return (
        f'<testcase name="A.B" status="notrun"><skipped message="{message}"/><system-out>[ RUN      ] A.B\n'
        f"a_test.cc:4: Skipped\n{printed}\n[  SKIPPED ] A.B (0 ms)</system-out></testcase>"
    )


def googletest(reason: str) -> str:
    return ctest("SKIP_REGULAR_EXPRESSION_MATCHED", reason)


def pytest_skip(reason: str) -> str:
    return f'<testcase name="a"><skipped type="pytest.skip" message="{reason}">a.py:1</skipped></testcase>'


PASSED = '<testcase name="A.A" status="run"><system-out>a_test.cc:4: Skipped</system-out></testcase>'
FAILED = '<testcase name="A.C" status="fail"><failure message=""/></testcase>'
DISABLED = '<testcase name="A.D" status="disabled"><system-out>Disabled</system-out></testcase>'
NO_GPU, NO_HOPPER = "tfla: no GPU can be used here (no driver)", "tfla: this GPU is not a Hopper"

REPORTS = [
    ([PASSED, PASSED, FAILED, DISABLED], "2 1 0 "),
    ([PASSED, '<testcase name="a"><error message="in setup"/></testcase>'], "1 1 0 "),
    ([PASSED, ctest("Unable to find executable")], "1 1 0 "),
    ([googletest(NO_GPU), googletest(NO_HOPPER), PASSED], "1 0 2 no GPU"),
    ([googletest(NO_HOPPER), googletest(NO_HOPPER)], "0 0 2 this GPU is not a Hopper"),
    ([googletest(NO_HOPPER), googletest("tfla: this GPU has no clusters")], "0 0 2 "),
    ([googletest(NO_GPU), googletest("too little memory")], "0 0 2 "),
    ([pytest_skip("JAX sees no GPU"), pytest_skip("needs two GPUs"), FAILED], "0 1 2 no GPU"),
    ([pytest_skip("needs two GPUs"), PASSED], "1 0 1 needs two GPUs"),
]


@pytest.mark.parametrize(("cases", "line"), REPORTS, ids=[str(number) for number in range(len(REPORTS))])
def test_report(tmp_path, cases, line):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    done = subprocess.run([sys.executable, TOOL, report], capture_output=True, text=True, check=True)
    assert done.stdout == line + "\n"


def test_half_a_report_is_an_error(tmp_path):
    (tmp_path / "report.xml").write_text(f"<testsuite>{PASSED}")
    done = subprocess.run([sys.executable, TOOL, tmp_path / "report.xml"], capture_output=True, check=False)
    assert done.returncode != 0 and not done.stdout
