#!/usr/bin/env python3
"""Breaks the code on purpose, one small change at a time, and sees whether a test notices.

The changes are rows of tools/mutations/*.toml (tools/mutations/README.md says what a row holds). Each is made in a
copy of the working tree under build/mutate, built there, and judged by the tests that the row names.

examples:
  tools/mutate.py                            every row, tests in as many processes as there are cores
  tools/mutate.py --list                     the rows and what each is about
  tools/mutate.py --only core. step-expm1    rows whose names contain one of these
  tools/mutate.py --suite python --jobs 1    rows that the Python tests judge, one process at a time
  tools/mutate.py --check                    whether every row still applies to the tree; builds nothing

Fails where a mutation survives that no row explains, or a row does not apply, does not compile or explains in vain.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "mutate"
# Less optimisation than a release, since every row compiles a file or two; what a mutation leaves unused is no error.
LENIENT = "-DTFLA_WERROR=OFF"
QUICKLY = ("-DTFLA_BUILD_CLI=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG", LENIENT)


class RowError(Exception):
    """A row that says too little, or no longer fits the tree."""


@dataclass(frozen=True)
class Row:
    name: str
    file: str
    old: str
    new: str
    suite: str
    tests: tuple[str, ...] = ()
    survives: str = ""

    def applied(self, text: str) -> str:
        """The text of the file with the change made."""
        if (count := text.count(self.old)) != 1:
            raise RowError(f"the old text occurs {count} times in {self.file}; it must occur once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    row: Row
    word: str  # killed, SURVIVED, survives, skipped, STALE, DID NOT COMPILE, EXPLAINED IN VAIN
    why: str = ""

    @property
    def bad(self) -> bool:
        return self.word.isupper()


# Rows --------------------------------------------------------------------------------------------------------------


def read_row(table: Path, entry: dict) -> Row:
    name = entry.get("name", "a row without a name")
    if unknown := set(entry) - set(Row.__dataclass_fields__):
        raise RowError(f"{table.name}: {name} has the unknown field {min(unknown)}")
    if missing := {"name", "file", "old", "new", "suite"} - set(entry):
        raise RowError(f"{table.name}: {name} has no {min(missing)}")
    if entry["suite"] not in SUITES:
        raise RowError(f"{table.name}: {name} has the suite {entry['suite']}; it must be one of {', '.join(SUITES)}")
    if entry["old"] == entry["new"]:
        raise RowError(f"{table.name}: {name} changes nothing")
    return Row(**{**entry, "tests": tuple(entry.get("tests", ()))})


def read_rows(tables: Path) -> list[Row]:
    rows = []
    for table in sorted(tables.glob("*.toml")):
        rows += [read_row(table, entry) for entry in tomllib.loads(table.read_text())["mutation"]]
    names = [row.name for row in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RowError(f"two rows are called {min(twice)}")
    return rows


def check(row: Row, tree: Path) -> Verdict | None:
    """What is wrong with a row, if anything is."""
    path = tree / row.file
    try:
        row.applied(path.read_text())
    except (OSError, RowError) as error:
        return Verdict(row, "STALE", str(error))
    return None


# Processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    words: list[str]
    environment: dict[str, str]
    folder: Path


def run_until_failure(commands: list[Command], seconds: float) -> tuple[int, str]:
    """Runs the commands at once; the status and output of the first that fails, which ends the others.

    Status 0: all succeeded. None of them outlives the call, nor does what they started.
    """
    outputs = [tempfile.TemporaryFile("w+", errors="replace") for _ in commands]
    running = {}
    try:
        for command, output in zip(commands, outputs, strict=True):
            environment = {**os.environ, **command.environment}
            running[subprocess.Popen(
                command.words, cwd=command.folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )] = output  # fmt: skip
        waiting, end = set(running), time.monotonic() + seconds
        while waiting:
            for process in [process for process in waiting if process.poll() is not None]:
                waiting.remove(process)
                if process.returncode != 0:
                    running[process].seek(0)
                    return process.returncode, running[process].read()
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.05)
        return 0, ""
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for output in outputs:
            output.close()


def build(*commands: list[str], tree: Path) -> str:
    """The output of the first command that fails; empty if none does."""
    for words in commands:
        status = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=False, errors="replace")
        if status.returncode != 0:
            return status.stdout + status.stderr
    return ""


# Suites ------------------------------------------------------------------------------------------------------------


class GoogleTests:
    """Test programs of a preset; a row's tests are GoogleTest filters."""

    def __init__(self, preset: str, everything: str, *programs: str) -> None:
        self.preset, self.everything, self.programs = preset, everything, programs

    def unavailable(self) -> str:
        if self.preset != "cuda":
            return ""
        if not shutil.which("nvcc"):
            return "needs nvcc"
        listed = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False)
        return "" if listed and listed.returncode == 0 and listed.stdout else "needs a GPU"

    def build(self, tree: Path, jobs: int) -> str:
        configure = ["cmake", "--preset", self.preset, *QUICKLY]
        targets = [Path(program).name for program in self.programs]
        compile_tests = ["cmake", "--build", "--preset", self.preset, "--parallel", str(jobs), "--target", *targets]
        cache = tree / "build" / self.preset / "build.ninja"
        return build(*([] if cache.exists() else [configure]), compile_tests, tree=tree)

    def commands(self, tree: Path, tests: tuple[str, ...], jobs: int) -> list[Command]:
        chosen = ":".join(tests) or self.everything
        words = [f"--gtest_filter={chosen}", "--gtest_fail_fast", "--gtest_brief=0", "--gtest_color=no"]
        shards = {"GTEST_TOTAL_SHARDS": str(jobs), "OMP_WAIT_POLICY": "passive"}
        return [
            Command(
                [str(tree / "build" / self.preset / "tests" / program), *words],
                {**shards, "GTEST_SHARD_INDEX": str(shard)},
                tree,
            )  # fmt: skip
            for program in self.programs
            for shard in range(jobs)
        ]

    @staticmethod
    def killer(output: str) -> str:
        if failed := re.search(r"^\[  FAILED  \] ([\w./]+)", output, re.MULTILINE):
            return failed[1]
        begun = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
        return f"{begun[-1]} (it crashed)" if begun else output.strip()[-200:]


class PythonTests:
    """The package from its sources, on bindings that are built in the copy; a row's tests are files or node ids."""

    def unavailable(self) -> str:
        return "" if (ROOT / ".venv-python" / "bin" / "python").exists() else "needs .venv-python (make test makes it)"

    def build(self, tree: Path, jobs: int) -> str:
        environment = tree / ".venv-python"
        if not environment.exists():
            environment.symlink_to((ROOT / ".venv-python").resolve())
        return build(["tools/build_python.sh", ".venv-python", LENIENT], tree=tree)

    def commands(self, tree: Path, tests: tuple[str, ...], jobs: int) -> list[Command]:
        folder = tree / "python" / "tests"
        files = {path.name: path for path in folder.rglob("test_*.py")}
        names = list(tests) or sorted(files)
        words = [str(tree / ".venv-python" / "bin" / "python"), "-m", "pytest", "-x", "-q", "-rfE", "--tb=no",
                 "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", str(tree / "pyproject.toml")]  # fmt: skip
        environment = {"PYTHONPATH": str(tree / "python"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        parts = [names[part::jobs] for part in range(min(jobs, len(names)))]

        def found(name: str) -> str:
            file, *inside = name.split("::", 1)
            return "::".join([str(files[file]), *inside])

        return [Command([*words, *map(found, part)], environment, tree) for part in parts]

    @staticmethod
    def killer(output: str) -> str:
        failed = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(.*?)(?: - .*)?$", output, re.MULTILINE)
        return failed[1] if failed else output.strip()[-200:]


SUITES: dict[str, GoogleTests | PythonTests] = {
    "cpp": GoogleTests("release", "*", "tfla_tests", "analysis/tfla_analysis_tests"),
    "python": PythonTests(),
    "cuda": GoogleTests("cuda", "*Cuda*", "tfla_tests"),
    "emulated": GoogleTests("emulated", "*Cuda*", "tfla_tests"),
}


# Trees -------------------------------------------------------------------------------------------------------------


def copy_tree(to: Path) -> None:
    """Makes `to` a copy of the working tree, without what git ignores. Files that are equal already keep their times,
    so that nothing is built anew for them; a mutation that an interrupted run left is undone."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            cwd=ROOT, capture_output=True, text=True, check=True).stdout  # fmt: skip
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    to.mkdir(parents=True, exist_ok=True)
    manifest = to.with_suffix(".files")
    for gone in set(manifest.read_text().splitlines() if manifest.exists() else ()) - names:
        (to / gone).unlink(missing_ok=True)
    for name in names:
        source, copy = ROOT / name, to / name
        if copy.exists() and copy.read_bytes() == source.read_bytes():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        shutil.copymode(source, copy)
    manifest.write_text("\n".join(sorted(names)))


@contextmanager
def mutated(tree: Path, row: Row) -> Iterator[None]:
    path = tree / row.file
    text = path.read_text()
    path.write_text(row.applied(text))
    try:
        yield
    finally:
        path.write_text(text)


@contextmanager
def locked(tree: Path) -> Iterator[None]:
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tree.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"tfla: another mutate.py works in {tree}; wait for it") from None
        yield


# Work --------------------------------------------------------------------------------------------------------------


def judge(row: Row, tree: Path, jobs: int, seconds: float) -> Verdict:
    suite = SUITES[row.suite]
    with mutated(tree, row):
        if errors := suite.build(tree, jobs):
            first = next((line for line in errors.splitlines() if "error:" in line), errors.strip()[-200:])
            return Verdict(row, "DID NOT COMPILE", first)
        try:
            status, output = run_until_failure(suite.commands(tree, row.tests, jobs), seconds)
        except TimeoutError:
            status, output = 1, f"nothing but time: {seconds:.0f} s"
    if status == 0:
        return Verdict(row, "survives", row.survives) if row.survives else Verdict(row, "SURVIVED")
    killer = output if output.startswith("nothing but") else suite.killer(output)
    return Verdict(row, "EXPLAINED IN VAIN", f"{killer} kills it") if row.survives else Verdict(row, "killed", killer)


def judge_suite(name: str, rows: list[Row], jobs: int, seconds: float) -> Iterator[Verdict]:
    """The verdict on each row. The tests have to pass without a mutation first, or their failures would say nothing."""
    suite, tree = SUITES[name], SCRATCH / name
    if reason := suite.unavailable():
        yield from (Verdict(row, "skipped", reason) for row in rows)
        return
    say(f"{name}: building the tree as it is (minutes, the first time)")
    copy_tree(tree)
    if errors := suite.build(tree, jobs):
        raise SystemExit(f"tfla: the tree does not build without a mutation\n{errors[-4000:]}")
    everything = () if any(not row.tests for row in rows) else tuple({test: None for row in rows for test in row.tests})
    say(f"{name}: the tests without a mutation")
    try:
        status, output = run_until_failure(suite.commands(tree, everything, jobs), 10 * seconds)
    except TimeoutError:
        raise SystemExit(f"tfla: the tests take more than {10 * seconds:.0f} s without a mutation") from None
    if status != 0:
        raise SystemExit(f"tfla: {suite.killer(output)} fails without a mutation\n{output[-4000:]}")
    for number, row in enumerate(sorted(rows, key=lambda row: row.file), 1):  # neighbours share what they compile
        say(f"[{number}/{len(rows)}] {row.name}")
        verdict = judge(row, tree, jobs, seconds)
        say(f"[{number}/{len(rows)}] {row.name}: {verdict.word} {verdict.why}".rstrip())
        yield verdict


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    about, _, examples = (__doc__ or "").partition("\nexamples:")
    parser = argparse.ArgumentParser(
        description=about, epilog="examples:" + examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names contain one of these")
    parser.add_argument("--suite", choices=SUITES, help="rows that this suite judges")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--check", action="store_true", help="only see whether every row applies to the tree")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (every core)")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS",
                        help="tests that take longer count as killed (600)")  # fmt: skip
    parser.add_argument("--tables", type=Path, default=ROOT / "tools" / "mutations", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        rows = read_rows(args.tables)
    except RowError as error:
        raise SystemExit(f"tfla: {error}") from None
    rows = [row for row in rows if not args.only or any(part in row.name for part in args.only)]
    rows = [row for row in rows if args.suite in (None, row.suite)]
    if not rows:
        raise SystemExit("tfla: no row has such a name and suite; --list shows them all")
    verdicts = [verdict for row in rows if (verdict := check(row, ROOT))]
    if args.list:
        for row in rows:
            print(f"{row.suite:<7} {row.name:<40} {row.file}{'  (survives)' if row.survives else ''}")
        return 0
    if not args.check:
        stale = {verdict.row.name for verdict in verdicts}
        for suite in SUITES:
            chosen = [row for row in rows if row.suite == suite and row.name not in stale]
            if chosen:
                with locked(SCRATCH / suite):
                    verdicts += judge_suite(suite, chosen, args.jobs, args.timeout)
    for verdict in verdicts:
        print(f"{verdict.row.name:<40} {verdict.word:<16} {verdict.why}".rstrip())
    bad = sum(verdict.bad for verdict in verdicts)
    print(f"{len(rows)} rows, {sum(v.word == 'killed' for v in verdicts)} killed, {bad} to look at")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
