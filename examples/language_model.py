#!/usr/bin/env python3
"""A language model from nothing in about five minutes on a CPU: `make lm`.

Takes the sources of Python's own standard library, trains the preset "tiny" on their bytes, draws the loss, evaluates,
generates, and compares with the bigram model of the same text, which knows how often each byte follows each other.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sysconfig
from pathlib import Path

import numpy as np

from tfla.lm import preset, recipe
from tfla.lm.data import Dataset
from tfla.lm.data.prepare import Source, prepare
from tfla.lm.data.tokenizer import Bytes
from tfla.lm.evaluate import evaluate
from tfla.lm.generate import Sampling, complete
from tfla.lm.training import checkpoint
from tfla.lm.training.metrics import read_log
from tfla.lm.training.train import Run, train, vocabulary

LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3")
CLEARLY = 0.3  # nats per byte below the bigram model


def bigram_loss(data: Path) -> float:
    """Nats per token on the validation split, of counts of the training split with one added to each."""
    train_split, validation = (Dataset(data, name, 1) for name in ("train", "validation"))
    size, eod = train_split.vocab, train_split.eod

    def pairs(split: Dataset) -> tuple[np.ndarray, np.ndarray]:
        tokens = split.stream(0, split.tokens).astype(np.int64)
        return np.concatenate([[eod], tokens[:-1]]), tokens

    before, after = pairs(train_split)
    counts = 1.0 + np.bincount(before * size + after, minlength=size * size).reshape(size, size)
    log_p = np.log(counts) - np.log(counts.sum(1, keepdims=True))
    before, after = pairs(validation)
    return float(-log_p[before, after].mean())


def draw(run: Path, bigram: float, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_log(run / "log.jsonl")
    steps = [line for line in lines if "loss" in line]
    checks = [line for line in lines if "validation_loss" in line]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([x["step"] for x in steps], [x["loss"] for x in steps], color="0.7", label="training")
    axes.plot([x["step"] for x in checks], [x["validation_loss"] for x in checks], "o-", label="validation")
    axes.axhline(bigram, linestyle="--", color="C1", label="bigram model")
    axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0.9, 4))
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/lm"), help="folder for everything; default build/lm")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--gate", choices=("exp", "sigmoid"), default="exp")
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    data, run = out / "data", out / "run"

    source = Source([Path(sysconfig.get_path("stdlib"))], ("*.py",), LEFT_OUT, skip_bad=True)
    splits = prepare(source, data)["splits"]
    print(f"data: {splits['train']['bytes']:,} bytes to train on, {splits['validation']['bytes']:,} held out")
    bigram = bigram_loss(data)

    training = recipe("tiny", steps=arguments.steps, warmup=arguments.steps // 20, cooldown=arguments.steps // 10)
    config = preset("tiny", vocab=vocabulary(Dataset(data, "train", training.context)), gate=arguments.gate)
    summary = train(config, training, data, Run(run, eval_every=max(arguments.steps // 10, 1), eval_rows=64))
    if not summary["finished"]:
        print(f"stopped at step {summary['step']}; to go on: python -m tfla.lm train --out {run}")
        return 1

    model, _ = checkpoint.load_model(run)
    result = evaluate(model.eval(), Dataset(data, "validation", training.context))
    draw(run, bigram, out / "loss.png")
    prompt = "def main("
    tokenizer = Bytes()
    options = {"stop": {tokenizer.eod}, "allowed": tokenizer.size}
    (tokens,) = complete(model, [[tokenizer.eod, *prompt.encode()]], 300, Sampling(0.7, top_p=0.95), **options)
    print(f"--- generated\n{prompt}{tokenizer.decode(tokens).decode(errors='replace')}\n---")
    print(f"loss curve: {out / 'loss.png'}")
    print(f"bigram model: {bigram:.4f} nats per byte ({bigram / math.log(2):.3f} bits)")
    print(f"this model:   {result.loss:.4f} nats per byte ({result.bits_per_byte:.3f} bits per byte of text)")
    if result.loss > bigram - CLEARLY:
        print(f"the model is not {CLEARLY} below the bigram model, as it should be")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
