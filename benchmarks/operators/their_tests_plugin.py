"""A pytest plugin that puts other functions in the place of a package's own before tests are collected, and counts
which tests call them. their_tests.py runs it."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operators.packages import mamba_ssm

Function = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("their tests")
    group.addoption("--their-module", help="where the functions are, such as fla.ops.retention")
    group.addoption("--their-function", action="append", default=[], help="one whose calls are counted")
    group.addoption("--ours", help="a module whose functions take their places")
    group.addoption("--report", help="the JSON file of outcomes, written after every test")
    group.addoption("--chosen", help="a JSON file with names of tests; others are left out")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("their_module"):
        config.pluginmanager.register(Plugin(config))


def imported(name: str) -> Any:
    package, _, module = name.partition(".")
    return mamba_ssm(module) if package == "mamba_ssm" else importlib.import_module(name)


def put_in_place(package: str, original: Function, substitute: Function) -> None:
    """In every module of the package that holds the original, whatever it calls it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for key in [key for key, value in vars(module).items() if value is original]:
                setattr(module, key, substitute)


class Plugin:
    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self.report = Path(option("report"))
        self.chosen = set(json.loads(Path(option("chosen")).read_text())) if option("chosen") else None
        self.found: dict[str, dict[str, Any]] = {}
        self.now: dict[str, int] = {}  # calls of the test that runs
        module = imported(option("their_module"))
        ours = importlib.import_module(option("ours")) if option("ours") else None
        for name in option("their_function"):
            original = getattr(module, name)
            chosen = getattr(ours, name) if ours else original
            put_in_place(option("their_module").partition(".")[0], original, self.counted(name, chosen))

    def counted(self, name: str, function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            self.now[name] = self.now.get(name, 0) + 1
            return function(*arguments, **named)

        return call

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.chosen is None:
            return
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.chosen])
        items[:] = [item for item in items if item.nodeid in self.chosen]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.now.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test fails where any of its parts does; it passes by the part that calls it."""
        if report.when != "call" and report.outcome == "passed":
            return
        entry: dict[str, Any] = {"outcome": report.outcome, "calls": dict(self.now)}
        if report.outcome != "passed":
            entry["why"] = self.last_words(report)
        self.found[report.nodeid] = entry
        self.report.write_text(json.dumps(self.found, indent=1) + "\n")

    @staticmethod
    def last_words(report: pytest.TestReport) -> str:
        if isinstance(report.longrepr, tuple):  # where it is skipped, and why
            return str(report.longrepr[2])
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else report.longreprtext
        return next((line for line in text.splitlines() if line.strip()), "fails")[:200]
