"""`python -m tfla.lm generate`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tfla.lm.checks import check_output
from tfla.lm.commands import flags
from tfla.lm.data import tokenizer as tokens
from tfla.lm.decoder import Decoder
from tfla.lm.generate import Sampling, Session, generate
from tfla.lm.training.checkpoint import find

HELP = "continue texts"
EXAMPLES = """examples:
  python -m tfla.lm generate runs/a 'def main('
  python -m tfla.lm generate runs/a 'import os' 'class A:' --max-tokens 200 --temperature 0.8 --top-p 0.95
  python -m tfla.lm generate runs/a 'once upon' --save-state story.pt
  python -m tfla.lm generate runs/a --state story.pt --max-tokens 100"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    flags.add_checkpoint(parser)
    add("prompts", nargs="*", help="texts to continue, all in one batch")
    add("--max-tokens", type=int, default=256)
    flags.add_fields(parser, Sampling)
    add("--seed", type=int, default=0)
    add("--stop-tokens", type=int, nargs="+", help="besides the end of document")
    add("--state", type=Path, help="go on from a saved state")
    add("--save-state", type=Path, help="save the state at the end")
    add("--device")


def _begin(arguments: argparse.Namespace, decoder: Decoder, tokenizer: tokens.Tokenizer) -> Session:
    encoded = tokenizer.encode(arguments.prompts)
    if arguments.state is None:
        return Session(decoder, [[tokenizer.eod, *prompt] for prompt in encoded or [[]]])
    session = Session.load(decoder, arguments.state)
    if encoded:
        session.feed(encoded)
    return session


def _show(prompts: list[str], rows: Iterator[list[int | None]], tokenizer: tokens.Tokenizer) -> None:
    if len(prompts) == 1:  # as it comes
        print(prompts[0], end="", flush=True)
        for text in tokens.stream(tokenizer, (token for (token,) in rows if token is not None)):
            print(text, end="", flush=True)
        print()
        return
    results: list[list[int]] = [[] for _ in prompts]
    for row in rows:
        for result, token in zip(results, row, strict=True):
            result.extend([] if token is None else [token])
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        print(f"--- {number}\n{prompt}{tokenizer.decode(result).decode(errors='replace')}")


def run(arguments: argparse.Namespace) -> None:
    check_output("save_state", arguments.save_state)
    sampling = Sampling(**flags.given(arguments, flags.names(Sampling)))
    decoder, meta = flags.load_decoder(arguments.checkpoint, arguments.device)
    if meta["tokenizer"] is None:
        raise ValueError(f"tfla: {arguments.checkpoint} has no tokenizer; import it with --tokenizer")
    tokenizer = tokens.load(meta["tokenizer"], find(arguments.checkpoint), meta["eod"])
    session = _begin(arguments, decoder, tokenizer)
    stop = {tokenizer.eod, *(arguments.stop_tokens or ())}
    rows = generate(session, arguments.max_tokens, sampling, stop=stop, allowed=meta["tokens"], seed=arguments.seed)
    _show(arguments.prompts or [""] * session.logits.shape[0], rows, tokenizer)
    if arguments.save_state is not None:
        session.save(arguments.save_state)
