"""python -m tfla: versions, devices, what would run where, and a self-check."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
from itertools import takewhile
from typing import Any

import tfla
from tfla import info

SHAPE = {"tokens": 4096, "heads": 4, "dqk": 128, "dhv": 256}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _kernels(plan: str, device: info.Device) -> str:
    """The kernels of a plan in one line. For a GPU a plan has a line for each, with what it is compiled for."""
    lines = plan.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("kernels"))
    listed = [lines[first].removeprefix("kernels"), *takewhile(lambda line: line.startswith(" "), lines[first + 1 :])]
    if device == "cpu":
        return listed[0].strip()
    kernels = [line.split(maxsplit=1) for line in listed]
    return ", ".join(f"{name} ({', '.join(rest)})" for name, *rest in kernels)


def _plans(device: info.Device) -> list[str]:
    dtype: info.DType = "bfloat16" if device == "cuda" else "float32"
    operations: tuple[info.Operation, ...] = ("forward", "backward", "step")
    lines = []
    for operation in operations:
        shape: dict[str, Any] = SHAPE if operation != "step" else SHAPE | {"tokens": 1}
        plan = info.describe(operation, dtype=dtype, device=device, **shape)
        lines.append(f"  {operation:9} {dtype}: {_kernels(plan, device)}")
    return lines


def _devices() -> list[str]:
    """Prints the devices and returns those a call can run on."""
    devices: tuple[info.Device, ...] = ("cpu", "cuda")
    usable: list[str] = []
    for device in devices:
        try:
            lines = _plans(device)
        except RuntimeError as error:
            print(f"{device:10} {error}")
            continue
        usable.append(device)
        print(
            f"{device:10} kernels at T {SHAPE['tokens']}, H {SHAPE['heads']}, dqk {SHAPE['dqk']}, dhv {SHAPE['dhv']}:"
        )
        print("\n".join(lines))
    return usable


def _check(devices: list[str], verbose: bool) -> bool:
    import torch

    from tfla import check

    passed = True
    for device in devices:
        if device == "cuda" and not torch.cuda.is_available():
            print("cuda       this torch sees no GPU; not checked")
            continue
        rows = check.run(device)
        failed = [row for row in rows if not row.passed]
        passed = passed and not failed
        for row in rows if verbose else failed:
            print(f"  {'ok' if row.passed else 'FAILED':6} {row.name}: {row.worst} at {row.error:.2f} of its bound")
        print(f"{device:10} {len(rows) - len(failed)} of {len(rows)} checks against float64 passed")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tfla", description=__doc__)
    parser.add_argument("--no-check", action="store_true", help="print what there is and check nothing")
    parser.add_argument("--verbose", action="store_true", help="print every check")
    options = parser.parse_args()
    print(f"tfla       {tfla.__version__} (libtfla {info.library_version()})")
    print(f"python     {platform.python_version()} on {platform.machine()}")
    for package in ("torch", "jax"):
        print(f"{package:10} {_version(package)}")
    devices = _devices()
    if options.no_check:
        return 0
    if importlib.util.find_spec("torch") is None:
        print("self-check needs torch; not run")
        return 0
    return 0 if _check(devices, options.verbose) else 1


if __name__ == "__main__":
    sys.exit(main())
