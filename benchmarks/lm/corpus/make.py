"""From files to tokens: all stages of the corpus, and the manifest that says what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lm.corpus import collect, kinds, pack
from benchmarks.lm.corpus.collect import Say
from benchmarks.lm.corpus.repeats import digest
from tfla.lm.data import Dataset
from tfla.lm.data.prepare import Source, is_validation, prepare
from tfla.lm.data.tokenizer import TokenizerFile

VOCABULARY = 16384
VALIDATION = 0.02
SAMPLE = 8
TOKENIZER = "tokenizer.json"


def _documents(work: Path, wanted: tuple[kinds.Kind, ...]) -> Iterator[tuple[str, str]]:
    """(kind, text) in the order in which `prepare` reads them."""
    for name in sorted(kind.name for kind in wanted):
        with (work / "text" / f"{name}.jsonl").open() as lines:
            for line in lines:
                yield name, json.loads(line)["text"]


def _sample(work: Path, wanted: tuple[kinds.Kind, ...], part: float) -> Iterator[str]:
    """What the tokenizer learns from: as many documents of every kind, by a hash, and none that are held out."""
    for _, text in _documents(work, wanted):
        if digest(text) // 2**32 % SAMPLE == 0 and not is_validation(text, part):
            yield text


def tokens_by_kind(dataset: Path, work: Path, wanted: tuple[kinds.Kind, ...], part: float) -> dict[str, dict[str, int]]:
    """Of the documents as they lie in the splits, so that the sums are those of the dataset."""
    places: dict[str, list[str]] = {"train": [], "validation": []}
    for kind, text in _documents(work, wanted):
        places["validation" if is_validation(text, part) else "train"].append(kind)
    counts: dict[str, dict[str, int]] = {kind.name: {"train": 0, "validation": 0} for kind in wanted}
    for split, owners in places.items():
        data = Dataset(dataset, split, 1)
        ends = np.flatnonzero(data.stream(0, data.tokens) == data.eod) + 1
        if len(ends) != len(owners):
            raise RuntimeError(f"tfla: {dataset} has {len(ends)} documents of {split}, the text has {len(owners)}")
        for kind, tokens in zip(owners, np.diff(ends, prepend=0).tolist(), strict=True):
            counts[kind][split] += tokens
    return counts


def make(
    work: Path,
    say: Say,
    *,
    roots: list[Path],
    packages: tuple[str, ...] = kinds.PACKAGES,
    wanted: tuple[kinds.Kind, ...] = kinds.KINDS,
    vocabulary: int = VOCABULARY,
    validation: float = VALIDATION,
) -> dict[str, Any]:
    """work/dataset, work/corpus.tar.xz and work/corpus.json. Stages that an earlier call has finished are kept."""
    versions = collect.fetch(packages, work / "packages", say)
    collected = collect.collect([*roots, *(work / "packages" / name for name in versions)], work, say, wanted)
    dataset, packed = work / "dataset", work / "corpus.tar.xz"
    if not (work / TOKENIZER).exists():
        say(f"a byte-level BPE of {vocabulary} tokens, from one document in {SAMPLE}")
        TokenizerFile.train(_sample(work, wanted, validation), vocabulary).save(work)
    if not dataset.exists():
        say("all text through it")
        texts = [work / "text" / f"{name}.jsonl" for name in sorted(collected)]
        prepare(Source(texts), dataset, tokenizer=work / TOKENIZER, validation=validation)
        packed.unlink(missing_ok=True)
    if not packed.exists():
        say("packing")
        pack.pack(dataset, packed)
    meta = json.loads((dataset / "dataset.json").read_text())
    counts = tokens_by_kind(dataset, work, wanted, validation)
    manifest = {
        "packages": versions, "vocab": meta["vocab"], "validation": validation,
        "fingerprint": f"{Dataset(dataset, 'train', 1).fingerprint():08x}",
        "tokens": {split: summary["tokens"] for split, summary in meta["splits"].items()},
        "documents": {split: summary["documents"] for split, summary in meta["splits"].items()},
        "bytes": {split: summary["bytes"] for split, summary in meta["splits"].items()},
        "kinds": {name: {**found, "tokens": counts[name]} for name, found in collected.items()},
        "packed": {"bytes": packed.stat().st_size, "sha256": pack.sha256(packed)},
    }  # fmt: skip
    (work / pack.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def clear(work: Path) -> None:
    """Everything but the packages, which are fetched again only where they are gone."""
    for name in ("text", "dataset"):
        shutil.rmtree(work / name, ignore_errors=True)
    for name in ("corpus.tar.xz", pack.MANIFEST, TOKENIZER):
        (work / name).unlink(missing_ok=True)
