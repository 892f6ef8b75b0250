#!/usr/bin/env python3
"""Prints what a JUnit report of ctest or pytest says: PASSED FAILED SKIPPED, and why they were if all share a reason.

usage: tools/count_tests.py REPORT
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree


def reason(case: ElementTree.Element, skipped: ElementTree.Element) -> str:
    """pytest's message, or for ctest what GoogleTest printed."""
    message = skipped.get("message", "")
    if message == "SKIP_REGULAR_EXPRESSION_MATCHED":
        found = re.search(r": Skipped\n(.+)", case.findtext("system-out") or "")
        message = found[1] if found else ""
    return message.removeprefix("tfla: ")


def shared(reasons: set[str]) -> str:
    """One for all of them. Tests that need a GPU say in many ways that there is none, or not theirs."""
    if all("GPU" in text for text in reasons) and any("no GPU" in text for text in reasons):
        return "no GPU"
    return reasons.pop() if len(reasons) == 1 else ""


def main() -> None:
    passed = failed = skipped = 0
    reasons = set()
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None and skip.get("message", "").startswith("Unable to find executable"):
            failed += 1  # to ctest it is one, though its report has it among the skipped
        elif skip is not None:
            skipped += 1
            reasons.add(reason(case, skip))
        elif case.get("status") != "disabled":
            passed += 1
    print(passed, failed, skipped, shared(reasons))


if __name__ == "__main__":
    main()
