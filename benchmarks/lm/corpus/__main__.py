"""Makes the corpus of the language model experiments: documentation, manuals and sources of Debian packages.

Files are those of this machine's packages (below --root) and of documentation packages that are fetched and unpacked
without being installed. The same files give the same tokens. Copies, repeated blocks of lines, licences, binaries and
data are left out; documents are held out by a hash of their text. A call that is interrupted is repeated.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.lm.corpus import kinds, make, pack
from tfla.lm.checks import sentence

EXAMPLES = """examples:
  python -m benchmarks.lm.corpus make build/corpus                 ten minutes; needs the package tokenizers
  python -m benchmarks.lm.corpus make build/corpus --again         from the files as they are now
  python -m benchmarks.lm.corpus unpack build/corpus/corpus.tar.xz build/corpus/dataset"""


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lm.corpus", description=__doc__, epilog=EXAMPLES, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="a folder with the dataset, corpus.tar.xz and corpus.json")
    making.add_argument("work", type=Path)
    making.add_argument(
        "--root", type=Path, default=Path("/"), help="where usr/share/doc and the others lie; default /"
    )
    making.add_argument("--packages", default=",".join(kinds.PACKAGES), help="fetched for their text; '' for none")
    making.add_argument("--again", action="store_true", help="begin anew, with the packages that are fetched already")
    unpacking = commands.add_parser("unpack", help="a packed corpus to a dataset for tfla.lm")
    unpacking.add_argument("packed", type=Path)
    unpacking.add_argument("out", type=Path)
    arguments = parser.parse_args(argv)
    begin = time.monotonic()

    def say(what: str) -> None:
        print(f"corpus: {time.monotonic() - begin:5.0f} s  {what}", file=sys.stderr, flush=True)

    try:
        if arguments.command == "unpack":
            pack.unpack(arguments.packed, arguments.out)
            return 0
        if arguments.again:
            make.clear(arguments.work)
        packages = tuple(name for name in arguments.packages.split(",") if name)
        manifest = make.make(arguments.work, say, roots=[arguments.root], packages=packages)
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        print(text, file=sys.stderr)
        return 2
    tokens, size = manifest["tokens"], manifest["packed"]["bytes"] / 1e6
    say(f"{tokens['train']:,} tokens to train on, {tokens['validation']:,} held out; packed {size:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
