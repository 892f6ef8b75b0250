"""Stages of the corpus before tokens: packages that are fetched and unpacked, and the text of each kind."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lm.corpus import kinds, text
from benchmarks.lm.corpus.repeats import Repeats

Say = Callable[[str], None]


def fetch(packages: tuple[str, ...], folder: Path, say: Say) -> dict[str, str]:
    """Versions of Debian packages that now lie unpacked in folder/NAME; those that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = {}
    for package in packages:
        target = folder / package
        if not target.is_dir():
            say(f"fetching {package}")
            download = folder / f".{package}"
            shutil.rmtree(download, ignore_errors=True)
            download.mkdir()
            result = subprocess.run(
                ["apt-get", "download", "-qq", package], cwd=download, capture_output=True, text=True, check=False
            )
            found = list(download.glob("*.deb"))
            if result.returncode or len(found) != 1:
                reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise RuntimeError(f"tfla: package {package} cannot be fetched: {reason}; leave it out of --packages")
            subprocess.run(["dpkg-deb", "-x", found[0], download / "files"], check=True)
            fields = subprocess.run(["dpkg-deb", "-f", found[0], "Version"], check=True, capture_output=True, text=True)
            (download / "files" / "version").write_text(fields.stdout.strip())
            (download / "files").rename(target)
            shutil.rmtree(download)
        versions[package] = (target / "version").read_text()
    return versions


def gather(kind: kinds.Kind, roots: list[Path], repeats: Repeats, out: Path, say: Say) -> dict[str, Any]:
    """Writes the documents of a kind as JSON lines and returns what became of its files."""
    left_out: Counter[str] = Counter()
    summary: dict[str, Any] = {"files": 0, "documents": 0, "bytes": 0}
    sources = hashlib.sha256()
    shown = time.monotonic()
    with out.open("w") as lines:
        for name, path in kinds.files(kind, roots):
            if summary["bytes"] >= kind.megabytes * 1_000_000:
                break
            summary["files"] += 1
            try:
                document = text.clean(path, kind.name)
                kept = repeats.without(document)
            except text.LeftOut as reason:
                left_out[str(reason)] += 1
                continue
            size = len(kept.encode())
            left_out["bytes of repeated blocks"] += len(document.encode()) - size
            summary["documents"] += 1
            summary["bytes"] += size
            sources.update(f"{name}\0".encode() + hashlib.sha256(kept.encode()).digest())
            lines.write(json.dumps({"text": kept, "kind": kind.name}) + "\n")
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                say(f"{kind.name}: {summary['bytes'] / 1e6:.0f} of at most {kind.megabytes} MB")
    return {**summary, "left_out": dict(sorted(left_out.items())), "sha256": sources.hexdigest()}


def collect(roots: list[Path], work: Path, say: Say, wanted: tuple[kinds.Kind, ...] = kinds.KINDS) -> dict[str, Any]:
    """work/text/KIND.jsonl of every kind. A kind that an earlier, interrupted call has finished is not read again."""
    folder = work / "text"
    folder.mkdir(parents=True, exist_ok=True)
    repeats, results = Repeats(), {}
    for kind in wanted:
        done, out = folder / f".{kind.name}.done", folder / f"{kind.name}.jsonl"
        if done.exists():
            results[kind.name], repeats = pickle.loads(done.read_bytes())
        else:
            partial = out.with_suffix(".partial")
            results[kind.name] = gather(kind, roots, repeats, partial, say)
            os.replace(partial, out)
            unfinished = done.with_suffix(".partial")
            unfinished.write_bytes(pickle.dumps((results[kind.name], repeats)))
            os.replace(unfinished, done)
        found = results[kind.name]
        say(f"{kind.name}: {found['documents']} documents, {found['bytes'] / 1e6:.1f} MB")
    return results
