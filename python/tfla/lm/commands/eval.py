"""`python -m tfla.lm eval`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from tfla.lm.checks import check_output
from tfla.lm.commands import flags
from tfla.lm.data.dataset import Dataset
from tfla.lm.evaluate import check_tokens, evaluate
from tfla.lm.training.checkpoint import data_path, find

HELP = "perplexity and bits per byte, also over position"
EXAMPLES = """examples:
  python -m tfla.lm eval runs/a --data data
  python -m tfla.lm eval runs/a/step-00000500 --data data --context 4096 --chunk-size 64 --json result.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    flags.add_checkpoint(parser)
    add("--data", type=Path, help="default: what it was trained on")
    add("--split", default="validation")
    add("--context", type=int, help="default: that of training")
    add("--batch", type=int, default=8)
    add("--rows", type=int, help="only the first rows")
    add("--chunk-size", type=int, help="of the kernels: changes rounding only")
    add("--device")
    add("--json", type=Path, help="also write the result there")


def run(arguments: argparse.Namespace) -> None:
    check_output("json", arguments.json)
    changes = {} if arguments.chunk_size is None else {"chunk_size": arguments.chunk_size}
    model, meta = flags.load(arguments.checkpoint, arguments.device, **changes)
    context = meta["recipe"]["context"] if arguments.context is None else arguments.context
    data = Dataset(data_path(arguments.checkpoint, meta, arguments.data), arguments.split, context)
    check_tokens(data, find(arguments.checkpoint), meta)
    result = evaluate(model, data, batch=arguments.batch, max_rows=arguments.rows)
    print(f"{result.tokens:,} tokens of {arguments.split!r}, rows of {context}")
    print(f"loss {result.loss:.5f}, perplexity {result.perplexity:.4f}, {result.bits_per_byte:.5f} bits per byte")
    print("position in document        loss     tokens")
    for row in result.positions:
        print(f"{row['from']:9,} to {row['to']:9,} {row['loss']:9.4f} {row['tokens']:10,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
