"""`python -m tfla.lm export`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from tfla.lm.commands import flags
from tfla.lm.convert import export, layouts
from tfla.lm.training.checkpoint import find, load_model

HELP = "write safetensors in a published layout"
EXAMPLES = """examples:
  python -m tfla.lm export runs/a --layout xlstm --out a-xlstm
  python -m tfla.lm export runs/a --layout huggingface --dtype bfloat16 --out a-hf"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_checkpoint(parser)
    parser.add_argument("--layout", choices=layouts(), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, required=True)


def run(arguments: argparse.Namespace) -> None:
    model, meta = load_model(arguments.checkpoint)
    export(model, arguments.out, arguments.layout, dtype=getattr(torch, arguments.dtype), eod=meta["eod"])
    if meta["tokenizer"] not in (None, "bytes"):
        shutil.copy(find(arguments.checkpoint) / meta["tokenizer"], arguments.out / "tokenizer.json")
    print(f"written {arguments.out}")
