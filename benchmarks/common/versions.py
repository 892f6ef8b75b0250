"""Versions of what a benchmark ran with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
