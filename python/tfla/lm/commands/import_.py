"""`python -m tfla.lm import`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tfla.lm.convert import import_model
from tfla.lm.data.tokenizer import TokenizerFile
from tfla.lm.training.checkpoint import save_model

HELP = "read safetensors in a published layout"
EXAMPLES = """examples:
  python -m tfla.lm import xLSTM-7b/ --out xlstm-7b --tokenizer xLSTM-7b/tokenizer.json
  python -m tfla.lm generate xlstm-7b 'In 1905'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, help="a folder with safetensors and config.json or config.yaml")
    add("--out", type=Path, required=True, help="the checkpoint to write")
    add("--tokenizer", type=Path, help="its tokenizer.json, to generate text")
    add("--eod", help="name of the tokenizer's end-of-document token")
    add("--context", type=int, default=8192, help="rows for eval; default 8192")


def run(arguments: argparse.Namespace) -> None:
    model = import_model(arguments.path)
    about: dict[str, Any] = {
        "recipe": {"context": arguments.context}, "data": None, "data_path": None, "tokenizer": None,
        "tokenizer_json": None, "eod": None, "tokens": model.config.vocab,
    }  # fmt: skip
    if arguments.tokenizer is not None:
        tokenizer = TokenizerFile.load(arguments.tokenizer, arguments.eod)
        about |= {"tokenizer": "tokenizer.json", "tokenizer_json": arguments.tokenizer.read_text()}
        about |= {"eod": tokenizer.eod, "tokens": min(tokenizer.size, model.config.vocab)}
    save_model(arguments.out, model, about)
    print(f"written {arguments.out}: {sum(x.numel() for x in model.parameters()):,} parameters")
