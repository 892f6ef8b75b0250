"""The command line of tfla.lm."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import signal
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from tfla.lm.config import HELP, ModelConfig, Recipe
from tfla.lm.fields import field_types

EXAMPLES = {
    "": """examples:
  python -m tfla.lm prepare /usr/lib/python3 --include '*.py' --skip-bad --out data
  python -m tfla.lm train --data data --out runs/first
  python -m tfla.lm eval runs/first --data data
  python -m tfla.lm generate runs/first 'def main('
  python -m tfla.lm export runs/first --layout huggingface --out first-hf
  python -m tfla.lm bench --sizes 160m,1.4b""",
    "prepare": """examples:
  python -m tfla.lm prepare books/ --include '*.txt' --out data                    bytes
  python -m tfla.lm prepare web.jsonl --field content --train-tokenizer 16384 --out data
  python -m tfla.lm prepare web.jsonl --tokenizer tokenizer.json --eod '<|endoftext|>' --out data""",
    "train": """examples:
  python -m tfla.lm train --data data --out runs/a                                 tiny, on this machine
  python -m tfla.lm train --data data --out runs/b --preset 160m --gate sigmoid --compile --micro-batch 16
  python -m tfla.lm train --data data --out runs/c --preset 160m --kind transformer
  torchrun --nproc-per-node 8 -m tfla.lm train --data data --out runs/d --preset 1.4b --parallel fsdp --compile
  torchrun --nproc-per-node 8 -m tfla.lm train --data data --out runs/e --context 131072 --context-parallel 8
Interrupt it (Ctrl-C, SIGTERM, SIGHUP) and it saves; the same command goes on from there.""",
    "eval": """examples:
  python -m tfla.lm eval runs/a --data data
  python -m tfla.lm eval runs/a/step-00000500 --data data --context 4096 --chunk-size 64 --json result.json""",
    "generate": """examples:
  python -m tfla.lm generate runs/a 'def main('
  python -m tfla.lm generate runs/a 'import os' 'class A:' --max-tokens 200 --temperature 0.8 --top-p 0.95
  python -m tfla.lm generate runs/a 'once upon' --save-state story.pt
  python -m tfla.lm generate runs/a --state story.pt --max-tokens 100""",
    "export": """examples:
  python -m tfla.lm export runs/a --layout xlstm --out a-xlstm
  python -m tfla.lm export runs/a --layout huggingface --dtype bfloat16 --out a-hf""",
    "import": """examples:
  python -m tfla.lm import xLSTM-7b/ --out xlstm-7b --tokenizer xLSTM-7b/tokenizer.json
  python -m tfla.lm generate xlstm-7b 'In 1905'""",
    "bench": """examples:
  python -m tfla.lm bench --sizes 160m,400m,1.4b --json step.json
  python -m tfla.lm bench --sizes 1.4b --models exp,xlstm --batch 4 --fuse
  python -m tfla.lm bench --device cpu --sizes tiny --context 256 --batch 2 --no-compile""",
}
# Fields that the data decides.
NOT_GIVEN = {"vocab"}


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _argument(kind: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = _argument(next(part for part in arguments if part is not types.NoneType))
        if "choices" in inner:
            return inner
        read = inner.get("type", str)
        return {**inner, "type": lambda text: None if text == "none" else read(text)}
    if origin is Literal:
        return {"choices": arguments}
    if origin is tuple:
        return {"type": arguments[0], "nargs": len(arguments)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kind}


def _add_fields(parser: argparse.ArgumentParser, cls: type, title: str) -> None:
    group = parser.add_argument_group(title)
    kinds = field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name not in NOT_GIVEN:
            name = "--" + field.name.replace("_", "-")
            how = _argument(kinds[field.name])
            group.add_argument(name, default=argparse.SUPPRESS, dest=field.name, help=HELP[field.name], **how)


def _given(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in vars(arguments).items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _prepare(arguments: argparse.Namespace) -> None:
    from tfla.lm.data.prepare import Source, prepare

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


def _train(arguments: argparse.Namespace) -> None:
    from tfla.lm.config import preset, recipe
    from tfla.lm.data import Dataset
    from tfla.lm.fields import replace
    from tfla.lm.training.train import Run, resume_options, train, vocabulary

    model_changes, recipe_changes = _given(arguments, ModelConfig), _given(arguments, Recipe)
    before = resume_options(arguments.run, arguments.data)
    if before is not None:
        config, training, data = before
        config, training = replace(config, model_changes), replace(training, recipe_changes)
    else:
        if arguments.data is None:
            raise ValueError("tfla: data is not given; a new run needs --data, a folder that prepare has made")
        data = arguments.data
        training = recipe(arguments.preset, **recipe_changes)
        vocab = vocabulary(Dataset(data, "train", training.context))
        config = preset(arguments.preset, vocab=vocab, **model_changes)
    run = Run(
        arguments.run, log_every=arguments.log_every, save_every=arguments.save_every, eval_every=arguments.eval_every,
        eval_rows=arguments.eval_rows, keep=arguments.keep, stop_after=arguments.stop_after,
        time_limit=arguments.time_limit, device=arguments.device, tensorboard=arguments.tensorboard,
        progress=arguments.progress, peak=arguments.peak_flops, begin_from=arguments.begin_from,
    )  # fmt: skip
    summary = train(config, training, data, run)
    if os.environ.get("RANK", "0") == "0":
        state = "finished" if summary["finished"] else "stopped; the same command goes on from there"
        print(f"step {summary['step']} of {summary['steps']}: {state}")
        print(f"checkpoint {summary['checkpoint']}")


def _device(name: str | None) -> Any:
    from tfla.lm.training.parallel import find_device

    return find_device(name)


def _load(path: Path, device: Any, **changes: Any) -> Any:
    import torch

    from tfla.lm.training.checkpoint import load_model

    model, meta = load_model(path, torch.bfloat16 if device.type == "cuda" else torch.float32, **changes)
    return model.matrices_in_dtype().to(device).eval(), meta


def _eval(arguments: argparse.Namespace) -> None:
    from tfla.lm.checks import check_output
    from tfla.lm.data import Dataset
    from tfla.lm.evaluate import check_tokens, evaluate
    from tfla.lm.training.checkpoint import data_path, find

    check_output("json", arguments.json)
    changes = {} if arguments.chunk_size is None else {"chunk_size": arguments.chunk_size}
    model, meta = _load(arguments.checkpoint, _device(arguments.device), **changes)
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


def _generate(arguments: argparse.Namespace) -> None:
    from tfla.lm.checks import check_output
    from tfla.lm.data import tokenizer as tokens
    from tfla.lm.generate import Sampling, Session, generate
    from tfla.lm.training.checkpoint import find

    check_output("save_state", arguments.save_state)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    model, meta = _load(arguments.checkpoint, _device(arguments.device))
    if meta["tokenizer"] is None:
        raise ValueError(f"tfla: {arguments.checkpoint} has no tokenizer; import it with --tokenizer")
    tokenizer = tokens.load(meta["tokenizer"], find(arguments.checkpoint), meta["eod"])
    encoded = tokenizer.encode(arguments.prompts)
    if arguments.state is not None:
        session = Session.load(model, arguments.state)
        if encoded:
            session.feed(encoded)
    else:
        session = Session(model, [[tokenizer.eod, *prompt] for prompt in encoded or [[]]])
    stop = {tokenizer.eod, *(arguments.stop_tokens or ())}
    rows = generate(session, arguments.max_tokens, sampling, stop=stop, allowed=meta["tokens"], seed=arguments.seed)
    prompts = arguments.prompts or [""] * session.logits.shape[0]
    if len(prompts) == 1:  # as it comes
        print(prompts[0], end="", flush=True)
        for text in tokens.stream(tokenizer, (token for (token,) in rows if token is not None)):
            print(text, end="", flush=True)
        print()
    else:
        results: list[list[int]] = [[] for _ in prompts]
        for row in rows:
            for result, token in zip(results, row, strict=True):
                result.extend([] if token is None else [token])
        for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            print(f"--- {number}\n{prompt}{tokenizer.decode(result).decode(errors='replace')}")
    if arguments.save_state is not None:
        session.save(arguments.save_state)


def _export(arguments: argparse.Namespace) -> None:
    import shutil

    import torch

    from tfla.lm.convert import export
    from tfla.lm.training.checkpoint import find, load_model

    model, meta = load_model(arguments.checkpoint)
    export(model, arguments.out, arguments.layout, dtype=getattr(torch, arguments.dtype), eod=meta["eod"])
    if meta["tokenizer"] not in (None, "bytes"):
        shutil.copy(find(arguments.checkpoint) / meta["tokenizer"], arguments.out / "tokenizer.json")
    print(f"written {arguments.out}")


def _import(arguments: argparse.Namespace) -> None:
    from tfla.lm.convert import import_model
    from tfla.lm.data.tokenizer import TokenizerFile
    from tfla.lm.training.checkpoint import save_model

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


def _bench(arguments: argparse.Namespace) -> None:
    from tfla.lm import bench
    from tfla.lm.checks import check_output

    check_output("json", arguments.json)
    rows: list[dict[str, Any]] = []
    models = arguments.models or bench.SUBJECTS
    choices = [
        bench.Options(
            size, context=arguments.context, batch=arguments.batch, steps=arguments.steps, compile=arguments.compile,
            fuse=arguments.fuse, checkpoint_activations=arguments.checkpoint_activations,
            device=_device(arguments.device).type, layers=arguments.layers, vocab=arguments.vocab,
        )
        for size in arguments.sizes
    ]  # fmt: skip
    bench.check(models, choices)
    for options in choices:
        rows += bench.compare(models, options, lambda text: print(f"bench: {text}", file=sys.stderr))
        if arguments.json:  # after every size: what is measured is kept
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(bench.table(rows))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tfla.lm", description="Language models on the mLSTM.", epilog=EXAMPLES[""], formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=EXAMPLES[name], formatter_class=raw)
        sub.set_defaults(run_command=run)
        return sub

    sub = command("prepare", _prepare, "text files, JSON lines or folders of them to a dataset of tokens")
    sub.add_argument("paths", nargs="+", type=Path, help="text files (a document each), .jsonl files, folders")
    sub.add_argument("--out", type=Path, required=True, help="the dataset folder to write")
    sub.add_argument(
        "--include", action="append", metavar="PATTERN", help="files of folders that are taken; default all"
    )
    sub.add_argument("--exclude", action="append", metavar="NAME", help="folders inside folders that are left out")
    sub.add_argument("--field", default="text", help="the field of JSON lines that holds the text; default text")
    sub.add_argument("--skip-bad", action="store_true", help="count and leave out what would be an error")
    sub.add_argument("--tokenizer", type=Path, help="a tokenizer.json; without one tokens are bytes")
    sub.add_argument("--train-tokenizer", type=int, metavar="SIZE", help="make a byte-level BPE of SIZE tokens first")
    sub.add_argument("--eod", help="name of the tokenizer's end-of-document token")
    sub.add_argument("--validation", type=float, default=0.02, help="part of the documents held out; default 0.02")
    sub.add_argument("--shard-tokens", type=int, default=2**28, help="tokens per file; default 2^28")

    sub = command("train", _train, "train a model, or go on with a run")
    sub.add_argument("--data", type=Path, help="the dataset folder; a run that goes on knows its own")
    sub.add_argument("--out", dest="run", type=Path, required=True, help="folder of checkpoints and logs: the run")
    sub.add_argument("--preset", default="tiny", help="tiny, 160m, 400m, 1.4b or 7b: model and recipe; default tiny")
    sub.add_argument("--begin-from", type=Path, help="a checkpoint whose weights a new run begins with")
    sub.add_argument("--device", help="cpu or cuda; default cuda where there is one")
    sub.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    sub.add_argument("--save-every", type=int, default=500, metavar="STEPS")
    sub.add_argument("--eval-every", type=int, metavar="STEPS", help="evaluate on the validation split")
    sub.add_argument("--eval-rows", type=int, help="rows of it; default all")
    sub.add_argument("--keep", type=int, default=2, help="checkpoints kept; default 2")
    sub.add_argument("--stop-after", type=int, metavar="STEP", help="save and stop there")
    sub.add_argument("--time-limit", type=float, metavar="SECONDS", help="save and stop then")
    sub.add_argument("--peak-flops", type=float, help="of one device, for the utilisation")
    sub.add_argument("--tensorboard", action=argparse.BooleanOptionalAction, default=True)
    sub.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    _add_fields(sub, ModelConfig, "model (default: the preset's)")
    _add_fields(sub, Recipe, "recipe (default: the preset's, which is the paper's)")

    sub = command("eval", _eval, "perplexity and bits per byte, also over position")
    sub.add_argument("checkpoint", type=Path, help="a run or one of its checkpoints")
    sub.add_argument("--data", type=Path, help="default: what it was trained on")
    sub.add_argument("--split", default="validation")
    sub.add_argument("--context", type=int, help="default: that of training")
    sub.add_argument("--batch", type=int, default=8)
    sub.add_argument("--rows", type=int, help="only the first rows")
    sub.add_argument("--chunk-size", type=int, help="of the kernels: changes rounding only")
    sub.add_argument("--device")
    sub.add_argument("--json", type=Path, help="also write the result there")

    sub = command("generate", _generate, "continue texts")
    sub.add_argument("checkpoint", type=Path, help="a run or one of its checkpoints")
    sub.add_argument("prompts", nargs="*", help="texts to continue, all in one batch")
    sub.add_argument("--max-tokens", type=int, default=256)
    sub.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token")
    sub.add_argument("--top-k", type=int)
    sub.add_argument("--top-p", type=float)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--stop-tokens", type=int, nargs="+", help="besides the end of document")
    sub.add_argument("--state", type=Path, help="go on from a saved state")
    sub.add_argument("--save-state", type=Path, help="save the state at the end")
    sub.add_argument("--device")

    sub = command("export", _export, "write safetensors in a published layout")
    sub.add_argument("checkpoint", type=Path, help="a run or one of its checkpoints")
    sub.add_argument("--layout", choices=("xlstm", "huggingface"), required=True)
    sub.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    sub.add_argument("--out", type=Path, required=True)

    sub = command("import", _import, "read safetensors in a published layout")
    sub.add_argument("path", type=Path, help="a folder with safetensors and config.json or config.yaml")
    sub.add_argument("--out", type=Path, required=True, help="the checkpoint to write")
    sub.add_argument("--tokenizer", type=Path, help="its tokenizer.json, to generate text")
    sub.add_argument("--eod", help="name of the tokenizer's end-of-document token")
    sub.add_argument("--context", type=int, default=8192, help="rows for eval; default 8192")

    sub = command("bench", _bench, "time of a training step beside the published xlstm and a Transformer")
    sub.add_argument("--sizes", type=_words, default=("160m",))
    sub.add_argument("--models", type=_words, help="some of exp,sigmoid,xlstm,xlstm-compiled,transformer; default all")
    sub.add_argument("--context", type=int, default=8192)
    sub.add_argument("--batch", type=int, default=8, help="rows; halved for all where it does not fit for one")
    sub.add_argument("--steps", type=int, default=5, help="timed steps, after two")
    sub.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    sub.add_argument("--fuse", action="store_true", help="one product for projections of the same input")
    sub.add_argument("--checkpoint-activations", action="store_true")
    sub.add_argument("--layers", type=int, help="instead of the preset's")
    sub.add_argument("--vocab", type=int, help="instead of 50304")
    sub.add_argument("--device")
    sub.add_argument("--json", type=Path)
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
    from tfla.lm.checks import sentence

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
