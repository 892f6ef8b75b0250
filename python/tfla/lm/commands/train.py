"""`python -m tfla.lm train`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tfla.lm.commands import flags
from tfla.lm.config import PRESETS, ModelConfig, Recipe, preset, recipe
from tfla.lm.data.dataset import Dataset
from tfla.lm.fields import replace
from tfla.lm.models import all_fields
from tfla.lm.training.train import Run, resume_options, train, vocabulary

HELP = "train a model, or go on with a run"
EXAMPLES = """examples:
  python -m tfla.lm train --data data --out runs/a                                 tiny, on this machine
  python -m tfla.lm train --data data --out runs/b --preset 160m --gate sigmoid --compile --micro-batch 16
  python -m tfla.lm train --data data --out runs/c --preset 160m --kind transformer
  torchrun --nproc-per-node 8 -m tfla.lm train --data data --out runs/d --preset 1.4b --parallel fsdp --compile
  torchrun --nproc-per-node 8 -m tfla.lm train --data data --out runs/e --context 131072 --context-parallel 8
Interrupt it (Ctrl-C, SIGTERM, SIGHUP) and it saves; the same command goes on from there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, help="the dataset folder; a run that goes on knows its own")
    add("--preset", default="tiny", help=f"one of {', '.join(PRESETS)}: model and recipe; default tiny")
    flags.add_fields(parser, Run, required=("directory",))
    model = parser.add_argument_group("model (default: the preset's)")
    for name, (cls, field) in all_fields().items():
        if name != "vocab":  # the data decide
            flags.add_field(model, cls, field)
    training = parser.add_argument_group("recipe (default: the preset's, which is the paper's)")
    flags.add_fields(training, Recipe, show_defaults=False)


def _configured(arguments: argparse.Namespace) -> tuple[ModelConfig, Recipe, Path]:
    """What to train and where its data are: as the run has begun, or as the preset says; with what is given."""
    model_changes, recipe_changes = flags.given(arguments, all_fields()), flags.given(arguments, flags.names(Recipe))
    before = resume_options(arguments.directory, arguments.data)
    if before is not None:
        config, training, data = before
        return replace(config, model_changes), replace(training, recipe_changes), data
    if arguments.data is None:
        raise ValueError("tfla: data is not given; a new run needs --data, a folder that prepare has made")
    training = recipe(arguments.preset, **recipe_changes)
    vocab = vocabulary(Dataset(arguments.data, "train", training.context))
    return preset(arguments.preset, vocab=vocab, **model_changes), training, arguments.data


def run(arguments: argparse.Namespace) -> None:
    summary = train(*_configured(arguments), Run(**flags.given(arguments, flags.names(Run))))
    if os.environ.get("RANK", "0") == "0":
        state = "finished" if summary["finished"] else "stopped; the same command goes on from there"
        print(f"step {summary['step']} of {summary['steps']}: {state}")
        print(f"checkpoint {summary['checkpoint']}")
