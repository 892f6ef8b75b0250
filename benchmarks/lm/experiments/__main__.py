"""The language model experiments of docs/experiments: runs them on a GPU, and draws the page from what they left.

gates      mLSTMexp, mLSTMsig and the Transformer of the paper's 160M shape on the same tokens
ablations  input gate bias and norm eps of a small model: loss and spikes of the gradient norm
steps      time of a training step, beside the published xlstm package and the Transformer

Runs need torch with CUDA and tfla built with CUDA, nothing else; steps also times the package xlstm where it is found.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.versions import versions

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("gates", "ablations", "steps")
BIASES = (0.0, -2.0, -5.0, -10.0)
EPSILONS = (1e-2, 1e-6, 1e-8)
SMALL = {"layers": 6, "dim": 256, "heads": 4}
EXAMPLES = """examples:
  python -m benchmarks.lm.experiments --prepare build/lm-data      once, where tokenizers is installed: 20 MB of tokens
  python -m benchmarks.lm.experiments --data build/lm-data --json build/lm.json --part gates
  python -m benchmarks.lm.experiments --data build/lm-data --json build/lm.json --part ablations
  python -m benchmarks.lm.experiments --json build/lm.json --part steps --sizes 1.4b
  python -m benchmarks.lm.experiments --draw build/lm.json         where matplotlib is: docs/experiments
Parts add to the JSON file, run by run; what is in it already is not run again."""


def say(what: str, begin: float = time.monotonic()) -> None:
    print(f"experiments: {time.monotonic() - begin:5.0f} s  {what}", file=sys.stderr, flush=True)


def prepare(out: Path, max_tokens: int, vocabulary: int) -> None:
    """Python sources of this machine, a part of them chosen by their text, with a BPE of their own."""
    import hashlib

    from tfla.lm.data import prepare as preparing

    folders = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]

    class Sample(preparing.Source):
        budget = 4 * max_tokens  # bytes, at about four per token

        def documents(self) -> Iterator[str]:
            seen: set[bytes] = set()
            taken = 0
            for text in super().documents():
                digest = hashlib.blake2b(text.encode(), digest_size=8, salt=b"sample").digest()
                if digest[0] < 96 and digest not in seen and taken + len(text) <= self.budget:
                    seen.add(digest)
                    taken += len(text)
                    yield text

    meta = preparing.prepare(
        Sample(folders, ("*.py",), ("__pycache__",), skip_bad=True), out, train_tokenizer=vocabulary, validation=0.03
    )
    size = sum(file.stat().st_size for file in out.iterdir())
    print({name: split["tokens"] for name, split in meta["splits"].items()}, f"{size / 1e6:.1f} MB in {out}")


def about() -> dict[str, Any]:
    import torch

    import tfla

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "python": platform.python_version(),
        "packages": {"tfla": tfla.__version__} | versions("torch", "triton", "xlstm", "mlstm_kernels"),
    }


class Results:
    """The JSON file: read before, written after every run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def has(self, part: str, name: str) -> bool:
        return name in self.content.get(part, {}).get("runs", {})

    def add(self, part: str, name: str, result: Any, **fields: Any) -> None:
        entry = self.content.setdefault(part, {"runs": {}})
        entry |= {"about": about(), **fields}
        command = " ".join(["python -m benchmarks.lm.experiments", *sys.argv[1:]])
        if command not in entry.setdefault("commands", []):
            entry["commands"].append(command)
        entry["runs"][name] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content) + "\n")
        os.replace(partial, self.path)


def train_once(data: Path, size: str, changes: dict[str, Any], training: dict[str, Any], limit: float | None) -> Any:
    """One run, without checkpoints: its curve, its validation, its rate."""
    from tfla.lm import preset, recipe
    from tfla.lm.data import Dataset
    from tfla.lm.training.metrics import read_log
    from tfla.lm.training.train import Run, train, vocabulary

    plan = recipe(size, **training)
    config = preset(size, vocab=vocabulary(Dataset(data, "train", plan.context)), **changes)
    directory = Path(tempfile.mkdtemp(prefix="tfla-lm-"))
    try:
        run = Run(
            directory, log_every=20, save_every=None, eval_every=plan.steps, time_limit=limit, tensorboard=False,
            progress=False,
        )  # fmt: skip
        try:
            summary = train(config, plan, data, run)
            failed = None
        except RuntimeError as error:  # a run whose loss is not finite is a result
            if "checkpoints before it are kept" not in str(error):
                raise
            summary, failed = {"finished": False}, str(error)
        lines = [line for line in read_log(directory / "log.jsonl") if "loss" in line]
    finally:
        shutil.rmtree(directory)
    rates = sorted(line["tokens_per_second"] for line in lines)
    return {
        "model": {**changes}, "recipe": training, "failed": failed, "finished": summary["finished"],
        "tokens": lines[-1]["tokens"], "seconds": summary.get("seconds"),
        **{name: summary.get(name) for name in ("validation_loss", "validation_perplexity")},
        "tokens_per_second": rates[len(rates) // 2], "mfu": lines[-1]["mfu"],
        "loss": [round(line["loss"], 5) for line in lines],
        "gradient_norm": [round(line["gradient_norm"], 5) for line in lines],
        "input_gate_max": [line["input_gate_max"] and round(line["input_gate_max"], 4) for line in lines],
    }  # fmt: skip


def plan(options: argparse.Namespace, *, steps: int, context: int, batch: int) -> dict[str, Any]:
    """A schedule of the paper's shape over fewer steps than its warm-up alone has."""
    steps = options.steps or steps
    sizes = {"context": options.context or context, "batch": options.batch or batch}
    return {"steps": steps, "lr": options.lr, "warmup": steps // 10, "cooldown": steps // 10, **sizes}


def gates(options: argparse.Namespace, results: Results) -> None:
    training = {**plan(options, steps=500, context=4096, batch=8), "compile": options.compile}
    runs = {"exp": {"gate": "exp"}, "sigmoid": {"gate": "sigmoid"}, "transformer": {"kind": "transformer"}}
    for seed in range(options.seeds):
        for name, changes in runs.items():
            label = f"{name}, seed {seed}"
            if (name == "transformer" and seed > 0) or results.has("gates", label):
                continue
            say(f"gates: {label}")
            recipe = {**training, "seed": seed}
            results.add(
                "gates", label, train_once(options.data, options.size, changes, recipe, options.time_limit),
                size=options.size,
            )  # fmt: skip


def ablations(options: argparse.Namespace, results: Results) -> None:
    training = {**plan(options, steps=300, context=1024, batch=32), "compile": False}
    runs: dict[str, dict[str, Any]] = {}
    for bias in BIASES:
        for eps in EPSILONS:
            runs[f"exp, bias {bias:g}, eps {eps:g}"] = {"input_gate_bias": bias, "cell_norm_eps": eps}
        runs[f"sigmoid, bias {bias:g}, eps 1e-06"] = {"input_gate_bias": bias, "gate": "sigmoid"}
    for name, changes in runs.items():
        if not results.has("ablations", name):
            say(f"ablations: {name}")
            result = train_once(options.data, "tiny", {**SMALL, **changes}, training, options.time_limit)
            results.add("ablations", name, result, model=SMALL)


def steps(options: argparse.Namespace, results: Results) -> None:
    """One model after the other, each kept when it is done. Where one does not fit, all get its batch."""
    from benchmarks.lm import step_time

    models = tuple(options.models.split(","))
    for size in options.sizes.split(","):
        setting = step_time.Setting(
            size, batch=options.batch or 8, context=options.context or 8192, steps=options.steps or 3,
            compile=options.compile, fuse=options.fuse,
        )  # fmt: skip
        while True:
            name = f"{size}, batch {setting.batch}{', fused' if options.fuse else ''}"
            rows = results.content.get("steps", {}).get("runs", {}).get(name, [])
            left = [model for model in models if model not in {row["model"] for row in rows}]
            if not left:
                break
            row = step_time.compare((left[0],), setting, say)[0]
            if row.get("batch", setting.batch) < setting.batch:
                setting = replace(setting, batch=row["batch"])
            else:
                results.add("steps", name, [*rows, row])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make the dataset and do nothing else")
    parser.add_argument("--max-tokens", type=int, default=10_000_000, help="of the dataset, about; default 10 million")
    parser.add_argument("--vocabulary", type=int, default=16384, help="of its BPE; default 16384")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="write docs/experiments and do nothing else")
    parser.add_argument("--data", type=Path, help="the dataset of gates and ablations")
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--size", default="160m", help="of gates; default 160m")
    parser.add_argument("--seeds", type=int, default=2, help="of gates; the Transformer has one; default 2")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak; default the paper's for 160M, 3e-3")
    parser.add_argument("--steps", type=int, help="training steps (gates 500, ablations 300) or timed steps (3)")
    parser.add_argument("--time-limit", type=float, help="seconds of one run, after which it stops where it is")
    parser.add_argument("--sizes", default="1.4b,400m,160m", help="of steps")
    parser.add_argument("--models", default="exp,sigmoid,transformer,xlstm,xlstm-compiled", help="of steps")
    parser.add_argument("--batch", type=int, help="sequences: gates 8, ablations 32, steps 8, halved where it must be")
    parser.add_argument("--context", type=int, help="tokens of a sequence: gates 4096, ablations 1024, steps 8192")
    parser.add_argument("--fuse", action="store_true", help="of steps: one product for projections of the same input")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    if options.prepare is not None:
        prepare(options.prepare, options.max_tokens, options.vocabulary)
    elif options.draw is not None:
        from benchmarks.lm.page import draw

        draw(options.draw, ROOT / "docs" / "experiments")
    elif options.part is None or options.json is None:
        parser.error("--part and --json are needed to run something")
    elif options.part != "steps" and options.data is None:
        parser.error("--data is needed: the folder that --prepare has made")
    else:
        {"gates": gates, "ablations": ablations, "steps": steps}[options.part](options, Results(options.json))


if __name__ == "__main__":
    main()
