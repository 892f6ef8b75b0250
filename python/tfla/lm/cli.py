"""The command line of tfla.lm: a parser of all commands, and how errors end the program."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys

from tfla.lm.checks import sentence
from tfla.lm.commands import COMMANDS

EXAMPLES = """examples:
  python -m tfla.lm prepare /usr/lib/python3 --include '*.py' --skip-bad --out data
  python -m tfla.lm train --data data --out runs/first
  python -m tfla.lm eval runs/first --data data
  python -m tfla.lm generate runs/first 'def main('
  python -m tfla.lm export runs/first --layout huggingface --out first-hf
  python -m tfla.lm bench --sizes 160m,1.4b"""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tfla.lm", description="Language models on the mLSTM.", epilog=EXAMPLES, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = command.HELP
        sub = commands.add_parser(name, help=text, description=text, epilog=command.EXAMPLES, formatter_class=raw)
        command.add_arguments(sub)
        sub.set_defaults(run_command=command.run)
    return parser


def _output_is_lost() -> bool:
    """What a closed pipe or a full disk does not take is dropped: the interpreter would stumble over it at its end."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack characters that a text has
        sys.stdout.reconfigure(errors="replace")
    try:
        arguments.run_command(arguments)
        print(end="", flush=True)
    except KeyboardInterrupt:
        print("tfla: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        lost = _output_is_lost()
        if lost and isinstance(error, BrokenPipeError):  # what reads the output, such as head, has enough
            return 128 + signal.SIGPIPE
        text = sentence(error)
        if text is None:
            raise
        print(text, file=sys.stderr)
        return 2
    return 0
