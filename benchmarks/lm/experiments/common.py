"""What all parts of the experiments use."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.versions import versions

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "docs" / "experiments"
LABELS = {"exp": "mLSTMexp", "sigmoid": "mLSTMsig", "transformer": "Transformer"}


def say(what: str, begin: float = time.monotonic()) -> None:
    print(f"experiments: {time.monotonic() - begin:5.0f} s  {what}", file=sys.stderr, flush=True)


def processor() -> str:
    """The name that the system gives the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def about(device: str, *packages: str) -> dict[str, Any]:
    """Where and with what a result was measured; packages: others that took part."""
    import torch

    import tfla

    name = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "packages": {"tfla": tfla.__version__} | versions("torch", "triton", *packages),
    }


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
