"""The page of benchmarks/cpu/conv.py: from measurements, and the one in docs from the file beside it."""

import json
import sys

from repository import ROOT

sys.path.append(str(ROOT))

from benchmarks.cpu import conv  # noqa: E402

ABOUT = {
    "cpu": "A processor", "threads": 2, "busy_before": 0.04, "date": "2000-01-01T00:00:00Z", "tfla": "0", "python": "3",
    "packages": {"torch": "1"}, "rounds": 3,
}  # fmt: skip


def test_page():
    case = {"operation": "forward", "channels": 1536, "dtype": "float32", "memory": "tokens"}
    times = {"PyTorch": [0.004, 0.1, 0.002], "tfla": [0.001, 0.01, 0.001]}
    page = conv.page({"about": ABOUT, "cases": [{"case": case, "difference": 0.0, "seconds": times}]})
    # Medians of each side, and of what a round says: 4, 10 and 2 times.
    assert (
        "| forward, 4 x 2,048 tokens, 1,536 channels, float32, tokens side by side | 4 ms | 1 ms | 4.0 |" in page
        and "A processor, 2 threads, 2000-01-01" in page
        and "took 4% of" in page.replace("\n", " ")
    )
    assert max(len(line) for line in page.splitlines()) <= 130


def test_page_in_docs_is_that_of_its_file():
    file, page = (ROOT / f"docs/benchmarks/conv_cpu.{suffix}" for suffix in ("json", "md"))
    measured = json.loads(file.read_text())
    assert page.read_text() == conv.page(measured)
    assert [conv.Case(**found["case"]) for found in measured["cases"]] == list(conv.CASES)
