"""Time of a training step of several models, kept as they are measured: steps.json."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lm.experiments.common import about, say, write


def add(path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {"runs": {}, "commands": []}
    content["about"] = about("cuda", "xlstm", "mlstm_kernels")
    command = " ".join(["python -m benchmarks.lm.experiments", *sys.argv[1:]])
    if command not in content["commands"]:
        content["commands"].append(command)
    content["runs"][name] = rows
    write(path, json.dumps(content) + "\n")


def measure(options: argparse.Namespace, path: Path) -> None:
    """One model after the other, each kept when it is done. Where one does not fit, all get its batch."""
    from benchmarks.lm import step_time

    models = tuple(options.models.split(","))
    for size in options.sizes.split(","):
        setting = step_time.Setting(
            size, batch=options.batch, context=options.context, steps=options.steps, compile=options.compile,
            fuse=options.fuse,
        )  # fmt: skip
        while True:
            name = f"{size}, batch {setting.batch}{', fused' if options.fuse else ''}"
            rows = json.loads(path.read_text())["runs"].get(name, []) if path.exists() else []
            left = [model for model in models if model not in {row["model"] for row in rows}]
            if not left:
                break
            row = step_time.compare((left[0],), setting, say)[0]
            if row.get("batch", setting.batch) < setting.batch:
                setting = replace(setting, batch=row["batch"])
            else:
                add(path, name, [*rows, row])
