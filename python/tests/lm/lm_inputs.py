"""A small dataset, model and recipe for the tests of tfla.lm."""

from __future__ import annotations

import json
import random
from pathlib import Path

import tokenizers
import torch

from tfla.lm import LanguageModel, ModelConfig, Recipe
from tfla.lm.data.prepare import Source, prepare

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
WORDS = (
    "the state of a sequence is kept in a matrix and read by a query ; gates say what is kept and what is taken".split()
)

EOD = 256
PROMPTS = [[EOD, *b"the state of"], [EOD], [EOD, *b"a", *b" gate" * 9], [EOD, *b"xy"]]


def write_texts(path: Path, documents: int = 40, seed: int = 0) -> Path:
    """JSON lines of made-up sentences, between one word and a few hundred bytes long."""
    generator = random.Random(seed)
    with path.open("w") as file:
        for _ in range(documents):
            text = " ".join(generator.choices(WORDS, k=generator.randint(1, 60)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def word_tokenizer(path: Path, vocabulary: dict[str, int]) -> Path:
    """A tokenizer.json of whole words with these numbers."""
    unknown = {"unk_token": "[UNK]"} if "[UNK]" in vocabulary else {}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, **unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def make_data(directory: Path, **options) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    out = directory / "data"
    prepare(Source([write_texts(directory / "texts.jsonl")]), out, **{"validation": 0.2, **options})
    return out


def small_model(**changes) -> ModelConfig:
    fields = {"layers": 2, "dim": 32, "heads": 2, "vocab": 320, "input_gate_bias": -1.0}
    return ModelConfig(**{**fields, **changes})


def small_recipe(**changes) -> Recipe:
    fields = {"lr": 5e-3, "batch": 4, "steps": 6, "context": 48, "warmup": 2, "cooldown": 2}
    return Recipe(**{**fields, **changes})


@torch.no_grad()
def greedy(model: LanguageModel, prompt: list[int], tokens: int) -> list[int]:
    """By the whole sequence, again for every token."""
    sequence = list(prompt)
    for _ in range(tokens):
        sequence.append(int(model(torch.tensor([sequence]))[0, -1].argmax()))
    return sequence[len(prompt) :]
