"""`python -m tfla.lm bench`: the time of a training step of our own models."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tfla._options import unknown
from tfla.lm.checks import check_output
from tfla.lm.commands import flags
from tfla.lm.config import ModelConfig
from tfla.lm.models import KINDS
from tfla.lm.training.timing import Setting, make_model, make_step, median_seconds, report

HELP = "time of a training step"
EXAMPLES = """examples:
  python -m tfla.lm bench --sizes 160m,400m,1.4b --json step.json
  python -m tfla.lm bench --sizes 1.4b --models exp --batch 4 --fuse
  python -m tfla.lm bench --device cpu --sizes tiny --context 256 --batch 2 --no-compile"""


def subjects() -> dict[str, dict[str, Any]]:
    """What can be timed: the variants of all kinds of models, as fields of a configuration."""
    return {
        name: {"kind": kind, **fields}
        for kind, model in KINDS.items()
        for name, fields in (model.variants or {kind: {}}).items()
    }


def subjects_on(device: torch.device) -> tuple[str, ...]:
    """Those that run there."""
    return tuple(
        name for name, fields in subjects().items() if device.type == "cpu" or KINDS[fields["kind"]].runs_on_cuda
    )


def model_config(name: str, setting: Setting) -> ModelConfig:
    if name not in subjects():
        raise unknown("models", name, tuple(subjects()))
    return setting.model(**subjects()[name])


def measure(name: str, setting: Setting) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    config = model_config(name, setting)
    module, total_loss = make_model(config, setting)
    step = make_step(module, total_loss, config.vocab, setting)
    if setting.where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return report(name, config, setting, median_seconds(step, setting.steps, setting.where), step().item())


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| size | model | batch | ms | tokens/s | MFU | GB |", "|" + "---|" * 7]
    for row in rows:
        mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
        memory = "" if row["peak_gigabytes"] is None else f"{row['peak_gigabytes']:.1f}"
        lines.append(
            f"| {row['size']} | {row['model']} | {row['batch']} | {row['milliseconds']:.1f} "
            f"| {row['tokens_per_second']:,.0f} | {mfu} | {memory} |"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=flags.words, default=("160m",), help="presets; default 160m")
    parser.add_argument(
        "--models", type=flags.words, help=f"some of {','.join(subjects())}; default all that run there"
    )
    flags.add_fields(parser, Setting, without=("size",))
    parser.add_argument("--json", type=Path)


def run(arguments: argparse.Namespace) -> None:
    check_output("json", arguments.json)
    if not arguments.sizes:
        raise ValueError("tfla: sizes is empty; it must name presets, such as 160m")
    settings = [Setting(size, **flags.given(arguments, flags.names(Setting))) for size in arguments.sizes]
    names = arguments.models or subjects_on(settings[0].where)
    for setting in settings:  # what is unknown is refused before the first is measured
        for name in names:
            model_config(name, setting)
    rows: list[dict[str, Any]] = []
    for setting in settings:
        for name in names:
            rows.append(measure(name, setting))
            torch.compiler.reset()
            if arguments.json:  # after every model: what is measured is kept
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
