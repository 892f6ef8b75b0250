"""The page of benchmarks/cpu/ssd.py: from measurements, and the one in docs from the file beside it. Both sides compute
the same."""

import json
import sys

import pytest

from repository import ROOT

sys.path.append(str(ROOT))

from benchmarks.cpu import beside, ssd  # noqa: E402

ABOUT = {
    "cpu": "A processor", "threads": 2, "busy_before": 0.04, "date": "2000-01-01T00:00:00Z", "tfla": "0", "python": "3",
    "packages": {"torch": "1", "transformers": "2"}, "rounds": 3,
}  # fmt: skip


def test_page():
    case = {
        "operation": "step",
        "tokens": 1,
        "batch": 16,
        "heads": 24,
        "head_dim": 64,
        "state": 128,
        "dtype": "float32",
    }
    times = {"transformers": [0.004, 0.1, 0.002], "tfla": [0.001, 0.01, 0.001]}
    page = ssd.page({"about": ABOUT, "cases": [{"case": case, "difference": 0.0, "seconds": times}]})
    # Medians of each side, and of what a round says: 4, 10 and 2 times.
    assert "| step, 16 x 1 token, 24 heads of 64, state 128, float32 | 4 ms | 1 ms | 4.0 |" in page
    assert "A processor, 2 threads, 2000-01-01" in page and "torch 1, transformers 2" in page
    assert max(len(line) for line in page.splitlines()) <= 130


def test_page_in_docs_is_that_of_its_file():
    file, page = (ROOT / f"docs/benchmarks/ssd_cpu.{suffix}" for suffix in ("json", "md"))
    measured = json.loads(file.read_text())
    assert page.read_text() == ssd.page(measured)
    assert [ssd.Case(**found["case"]) for found in measured["cases"]] == list(ssd.CASES)


@pytest.mark.parametrize("operation", ["forward", "training", "step"])
@pytest.mark.parametrize("dtype", ssd.DTYPES)
def test_both_sides_compute_the_same(operation, dtype):
    case = ssd.Case(operation, 1 if operation == "step" else 70, 2, heads=4, head_dim=8, state=16, dtype=dtype)
    apart = beside.difference({name: call() for name, call in ssd.calls(case).items()})
    assert apart < ssd.bound(case)
