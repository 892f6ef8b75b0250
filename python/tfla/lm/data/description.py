"""dataset.json, which describes a dataset: read and checked field by field, and the checksums of its shards."""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tfla.lm.checks import bare_name, is_whole, read_object

FORMAT, VERSION, META = "tfla.lm dataset", 1, "dataset.json"
DTYPES = {"uint16": 2, "uint32": 4}  # bytes of a token
THREADS = 8  # that compute checksums, which Python lets run at once

_verified: set[tuple[str, int, int, int]] = set()  # path, size, time of change, checksum


def read_meta(directory: Path) -> dict[str, Any]:
    file = directory / META
    if not file.exists():
        raise FileNotFoundError(
            f"tfla: {directory} is not a dataset: it has no {META}; python -m tfla.lm prepare makes one"
        )
    meta = read_object(file)
    if meta.get("format") != FORMAT or meta.get("version") != VERSION:
        found = f"{meta.get('format')!r} version {meta.get('version')!r}"
        raise ValueError(f"tfla: {file} is {found}; it must be {FORMAT!r} version {VERSION}")
    _check(meta, file)
    return meta


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _check(meta: dict[str, Any], file: Path) -> None:
    """Every field that is used later. Others may be there."""

    def need(holder: Any, at: str, name: str, good: Callable[[Any], bool], expected: str) -> Any:
        if not isinstance(holder, dict) or name not in holder:
            raise ValueError(f"tfla: {file} has no {at}{name}; it must be {expected}")
        if not good(holder[name]):
            raise ValueError(f"tfla: {file}: {at}{name} is {reprlib.repr(holder[name])}; it must be {expected}")
        return holder[name]

    dtype = need(meta, "", "dtype", lambda x: isinstance(x, str) and x in DTYPES, " or ".join(map(repr, DTYPES)))
    most = 2 ** (8 * DTYPES[dtype])
    vocab = need(meta, "", "vocab", lambda x: is_whole(x) and 0 < x <= most, f"a whole number from 1 to {most}")
    need(meta, "", "eod", lambda x: _is_count(x) and x < vocab, f"a token, a whole number from 0 to {vocab - 1}")
    # A checkpoint holds the tokenizer under its name, beside files of other kinds.
    tokenizer = need(meta, "", "tokenizer", lambda x: isinstance(x, str), "'bytes' or the name of a .json file")
    if tokenizer != "bytes" and (
        not bare_name(tokenizer, file).endswith(".json") or tokenizer in (META, "checkpoint.json")
    ):
        raise ValueError(f"tfla: {file}: tokenizer is {tokenizer!r}; it must be 'bytes' or a file like tokenizer.json")
    splits = need(meta, "", "splits", lambda x: isinstance(x, dict) and bool(x), "the splits by their names")
    for split, summary in splits.items():
        at = f"splits.{split}."
        for name in ("tokens", "bytes"):
            need(summary, at, name, _is_count, "a whole number that is not negative")
        shards = need(summary, at, "shards", lambda x: isinstance(x, list), "a list of files")
        for number, shard in enumerate(shards):
            inside = f"{at}shards.{number}."
            bare_name(need(shard, inside, "file", lambda x: True, "the name of a file"), file)
            need(shard, inside, "tokens", lambda x: _is_count(x) and x > 0, "a positive whole number")
            if "crc32" in shard:
                need(shard, inside, "crc32", lambda x: _is_count(x) and x < 2**32, "a checksum, from 0 to 2^32 - 1")
        total = sum(shard["tokens"] for shard in shards)
        if summary["tokens"] != total:
            raise ValueError(f"tfla: {file}: {at}tokens is {summary['tokens']}; its shards have {total}")


def check_sizes(directory: Path, meta: dict[str, Any], split: str) -> None:
    """Of the shards, to the byte."""
    for shard in meta["splits"][split]["shards"]:
        file = directory / shard["file"]
        expected = shard["tokens"] * DTYPES[meta["dtype"]]
        actual = file.stat().st_size if file.is_file() else None
        if actual != expected:
            has = "is missing" if actual is None else f"has {actual} bytes"
            raise ValueError(f"tfla: {file} {has}; {META} says {expected}: the dataset was cut off, prepare it again")


def _verify_file(file: Path, expected: int) -> None:
    if not file.is_file():
        raise ValueError(f"tfla: {file} is missing; the dataset is not whole, prepare it again")
    status = file.stat()
    key = (str(file.resolve()), status.st_size, status.st_mtime_ns, expected)
    if key in _verified:
        return
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            value = zlib.crc32(block, value)
    if value != expected:
        raise ValueError(f"tfla: {file} does not have its checksum; the dataset is damaged, prepare it again")
    _verified.add(key)


def verify(directory: Path, meta: dict[str, Any], splits: list[str], part: int = 0, parts: int = 1) -> None:
    """The checksums of every parts-th shard, once in a process; datasets of earlier versions have none."""
    shards = [shard for split in splits for shard in meta["splits"][split]["shards"] if "crc32" in shard][part::parts]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda shard: _verify_file(directory / shard["file"], shard["crc32"]), shards))
