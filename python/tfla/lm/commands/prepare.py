"""`python -m tfla.lm prepare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tfla.lm.data.prepare import Source, prepare

HELP = "text files, JSON lines or folders of them to a dataset of tokens"
EXAMPLES = """examples:
  python -m tfla.lm prepare books/ --include '*.txt' --out data                    bytes
  python -m tfla.lm prepare web.jsonl --field content --train-tokenizer 16384 --out data
  python -m tfla.lm prepare web.jsonl --tokenizer tokenizer.json --eod '<|endoftext|>' --out data"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="text files (a document each), .jsonl files, folders")
    add("--out", type=Path, required=True, help="the dataset folder to write")
    add("--include", action="append", metavar="PATTERN", help="files of folders that are taken; default all")
    add("--exclude", action="append", metavar="NAME", help="folders inside folders that are left out")
    add("--field", default="text", help="the field of JSON lines that holds the text; default text")
    add("--skip-bad", action="store_true", help="count and leave out what would be an error")
    add("--tokenizer", type=Path, help="a tokenizer.json; without one tokens are bytes")
    add("--train-tokenizer", type=int, metavar="SIZE", help="make a byte-level BPE of SIZE tokens first")
    add("--eod", help="name of the tokenizer's end-of-document token")
    add("--validation", type=float, default=0.02, help="part of the documents held out; default 0.02")
    add("--shard-tokens", type=int, default=2**28, help="tokens per file; default 2^28")


def run(arguments: argparse.Namespace) -> None:
    source = Source(
        arguments.paths, tuple(arguments.include or ("*",)), tuple(arguments.exclude or ()), arguments.field,
        arguments.skip_bad,
    )  # fmt: skip
    meta = prepare(
        source, arguments.out, tokenizer=arguments.tokenizer, train_tokenizer=arguments.train_tokenizer,
        eod=arguments.eod, validation=arguments.validation, shard_tokens=arguments.shard_tokens,
    )  # fmt: skip
    for name, split in meta["splits"].items():
        print(f"{name:10} {split['documents']:,} documents, {split['tokens']:,} tokens, {split['bytes']:,} bytes")
    for kind, count in meta["skipped"].items():
        print(f"{'skipped':10} {count:,} documents: {kind}")
    print(f"written    {arguments.out} (a vocabulary of {meta['vocab']:,})")
