"""Runs the tests of flash-linear-attention and mamba_ssm as they are, with their functions and with ours in their place
(tfla.compat.fla, tfla.compat.mamba). Writes their_tests.{json,md}: which tests pass with which.

One function is replaced at a time, since many tests compare one function of a package with another. With ours only
those tests run that call the function. A process that crashes or takes too long keeps the outcomes it has had.

Tests are in no wheel; a checkout has them:
  git clone --depth 1 https://github.com/fla-org/flash-linear-attention checkouts/fla
  git clone --depth 1 https://github.com/state-spaces/mamba checkouts/mamba
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.operators.watch import ROOT, say

EXAMPLES = """examples:
  python -m benchmarks.operators.their_tests --fla checkouts/fla --mamba checkouts/mamba --peers peers --out results
  python -m benchmarks.operators.their_tests --fla checkouts/fla --only chunk_retention --out results
"""
Outcomes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Tests:
    file: str  # of the checkout
    module: str  # that has the functions
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    ours: str
    tests: tuple[Tests, ...]


def ops(test: str, module: str, *functions: str) -> Tests:
    return Tests(f"tests/ops/test_{test}.py", f"fla.ops.{module}", functions)


def of_both(name: str) -> tuple[str, str]:
    return f"chunk_{name}", f"fused_recurrent_{name}"


TRITON = "mamba_ssm.ops.triton"
PACKAGES = {
    "fla": Package(
        "tfla.compat.fla",
        (
            ops("simple_gla", "simple_gla", *of_both("simple_gla")),
            ops("retention", "retention", *of_both("retention")),
            ops("lightning_attn", "lightning_attn", *of_both("lightning_attn")),
            ops("linear_attn", "linear_attn", "chunk_linear_attn"),
            ops("delta", "delta_rule", *of_both("delta_rule")),
            ops("gdn", "gated_delta_rule", *of_both("gated_delta_rule")),
        ),
    ),
    "mamba": Package(
        "tfla.compat.mamba",
        (
            Tests(
                "tests/ops/triton/test_ssd.py", f"{TRITON}.ssd_combined",
                ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
            ),
            Tests(
                "tests/ops/triton/test_selective_state_update.py", f"{TRITON}.selective_state_update",
                ("selective_state_update",),
            ),
        ),
    ),
}  # fmt: skip


@dataclass
class Runner:
    checkout: Path
    peers: Path | None
    deadline: float  # of time.monotonic()

    def environment(self) -> dict[str, str]:
        """A checkout's conftest.py imports the package before any plugin could say where it is."""
        places = [str(self.peers or ""), os.environ.get("PYTHONPATH", "")]
        return os.environ | {"PYTHONPATH": os.pathsep.join(place for place in places if place)}

    def outcomes(
        self, tests: Tests, functions: tuple[str, ...], ours: str = "", chosen: list[str] | None = None
    ) -> Any:
        """By the names of tests; with "ended" why a run came to no good end."""
        with tempfile.TemporaryDirectory() as directory:
            report, names = Path(directory) / "report.json", Path(directory) / "chosen.json"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.operators.their_tests_plugin"]
            command += ["-p", "no:cacheprovider", "--rootdir", str(self.checkout), str(self.checkout / tests.file)]
            command += ["--their-module", tests.module, "--report", str(report)]
            command += [f"--their-function={name}" for name in functions]
            command += ["--ours", ours] if ours else []
            if chosen is not None:
                names.write_text(json.dumps(chosen))
                command += ["--chosen", str(names)]
            left = self.deadline - time.monotonic()
            if left <= 0:
                return {"tests": {}, "ended": "the time was up"}
            ended = ""
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=self.environment(), capture_output=True, text=True, timeout=left, check=False
                )
                if done.returncode not in (0, 1):  # 1: tests that fail
                    words = (done.stderr.strip() or done.stdout.strip()).splitlines()
                    ended = f"pytest ended with {done.returncode}: {words[-1] if words else 'nothing said'}"
            except subprocess.TimeoutExpired:
                ended = "the time was up"
            return {"tests": json.loads(report.read_text()) if report.exists() else {}, "ended": ended}


def compared(runner: Runner, package: Package, only: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """keep: is given a dictionary for every function as soon as it is known."""
    for tests in package.tests:
        functions = tuple(name for name in tests.functions if only in name)
        if not functions:
            continue
        say(f"{tests.file}, with theirs")
        theirs = runner.outcomes(tests, functions)
        for function in functions:
            chosen = [name for name, entry in theirs["tests"].items() if function in entry["calls"]]
            found = {"file": tests.file, "function": function, "theirs": theirs["ended"], "ours": "", "tests": {}}
            found["before"] = failed_before(theirs["tests"])
            ours: Outcomes = {}
            if chosen:
                say(f"{tests.file}, {len(chosen)} tests with our {function}")
                run = runner.outcomes(tests, (function,), package.ours, chosen)
                ours, found["ours"] = run["tests"], run["ended"]
            for name in chosen:
                found["tests"][name] = {"theirs": theirs["tests"][name], "ours": ours.get(name, {"outcome": "not run"})}
            keep(found)


def failed_before(theirs: Outcomes) -> str:
    """Of tests that fail and have called none of the functions: nothing can be said of them with ours."""
    whys = [entry["why"] for entry in theirs.values() if entry["outcome"] == "failed" and not entry["calls"]]
    return f"{len(whys)} tests of the file fail before they call any: {whys[0]}" if whys else ""


# ---------------------------------------------------------------- the page


def outcomes_of(found: dict[str, Any], side: str) -> list[str]:
    return [entry[side]["outcome"] for entry in found["tests"].values()]


def page(results: list[dict[str, Any]]) -> str:
    rows, apart, ended = [], [], []
    for found in results:
        passed = {side: outcomes_of(found, side).count("passed") for side in ("theirs", "ours")}
        counts = [str(len(found["tests"])), str(passed["theirs"]), str(passed["ours"])]
        rows.append([found["file"].rpartition("/")[2], f"`{found['function']}`", *counts])
        for name, entry in found["tests"].items():
            words = {side: entry[side]["outcome"] for side in ("theirs", "ours")}
            if words["theirs"] != words["ours"]:
                why = entry["ours"].get("why") or entry["theirs"].get("why", "")
                apart.append(
                    [name.rpartition("/")[2], f"`{found['function']}`", *words.values(), why.replace("|", "\\|")]
                )
        ended += [f"- {found['function']}, with {side}: {found[side]}\n" for side in ("theirs", "ours") if found[side]]
        ended += [f"- {found['function']}, with theirs: {found['before']}\n"] if found["before"] else []
    text = ["# Tests of other packages\n", "Tests that call the function, and how many of them pass.\n"]
    text.append(table(["file", "function", "tests", "pass with theirs", "pass with ours"], rows))
    if apart:
        text += ["## With different outcomes\n", table(["test", "function", "theirs", "ours", "why"], apart)]
    if ended:
        text += ["## Without an answer\n", "".join(ended)]
    return "\n".join(text)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=form)
    for name in PACKAGES:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=f"a checkout of {name} with its tests")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="a folder of packages, put on sys.path")
    parser.add_argument("--only", default="", metavar="TEXT", help="functions whose names contain this")
    parser.add_argument("--budget", type=float, default=1800, help="seconds in all (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/benchmarks", help="the folder (build/benchmarks)")
    given = parser.parse_args()
    checkouts = {name: getattr(given, name) for name in PACKAGES if getattr(given, name)}
    if not checkouts:
        parser.error("there is no checkout; name one with " + " or ".join(f"--{name}" for name in PACKAGES))
    given.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []

    def keep(found: dict[str, Any]) -> None:
        results.append(found)
        (given.out / "their_tests.json").write_text(json.dumps(results, indent=1) + "\n")
        (given.out / "their_tests.md").write_text(page(results))

    deadline = time.monotonic() + given.budget
    for name, checkout in checkouts.items():
        runner = Runner(checkout.resolve(), given.peers.resolve() if given.peers else None, deadline)
        compared(runner, PACKAGES[name], given.only, keep)
    print(page(results))
    print(f"written: {given.out}/their_tests.md, their_tests.json")


if __name__ == "__main__":
    main()
