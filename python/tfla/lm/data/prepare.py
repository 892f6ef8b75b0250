"""Text files, JSON lines and folders of them to a dataset of tokens (see tfla.lm.data)."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import reprlib
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tfla.lm.checks import JSON_ERRORS, check_positive, naming, why_not_json
from tfla.lm.data.description import FORMAT, META, VERSION
from tfla.lm.data.tokenizer import Bytes, Tokenizer, TokenizerFile, surrogate

JSON_LINES = (".jsonl", ".ndjson")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs begin a file with it; it is not part of the text
ENCODE_AT_ONCE = 512  # documents handed to the tokenizer, which has threads of its own


@dataclass
class Source:
    """Documents of some paths. Bad ones are an error with file and line, or with skip_bad are counted."""

    paths: list[Path]
    include: tuple[str, ...] = ("*",)  # patterns of file names in folders
    exclude: tuple[str, ...] = ()  # names of folders inside them that are left out
    text_field: str = "text"  # of JSON lines
    skip_bad: bool = False
    skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.paths = [Path(path) for path in self.paths]
        if not self.paths:
            raise ValueError("tfla: paths is empty; it must name files or folders")

    def files(self) -> Iterator[Path]:
        for path in self.paths:
            if path.is_dir():
                found = sorted({file for pattern in self.include for file in self._matching(path, pattern)})
                if not found:
                    raise ValueError(f"tfla: {path} has no file that matches {' or '.join(self.include)}")
                yield from found
            elif path.exists():
                yield path
            else:
                raise FileNotFoundError(f"tfla: {path} does not exist")

    def _matching(self, folder: Path, pattern: str) -> list[Path]:
        try:
            files = [file for file in folder.rglob(pattern) if file.is_file()]
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"tfla: include is {pattern!r}, which is no pattern of file names: {error}") from None
        return [file for file in files if not set(file.relative_to(folder).parts[:-1]) & set(self.exclude)]

    def documents(self) -> Iterator[str]:
        self.skipped.clear()
        for file in self.files():
            if file.suffix in JSON_LINES:
                yield from self._lines(file)
            else:
                text = self._text(file.read_bytes().removeprefix(BYTE_ORDER_MARK), str(file), 1)
                if text is not None:
                    yield text

    def _bad(self, kind: str, sentence: str) -> None:
        if not self.skip_bad:
            raise ValueError(f"tfla: {sentence}; --skip-bad leaves such documents out")
        self.skipped[kind] += 1

    def _text(self, data: bytes, name: str, line: int) -> str | None:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            line += data.count(b"\n", 0, error.start)
            self._bad("not UTF-8", f"{name}:{line}: byte 0x{data[error.start]:02x} is not UTF-8")
            return None
        if not text.strip():
            self.skipped["empty"] += 1
            return None
        return text

    def _lines(self, file: Path) -> Iterator[str]:
        with file.open("rb") as stream, naming(file):
            for number, data in enumerate(stream, start=1):
                line = self._text(data.removeprefix(BYTE_ORDER_MARK) if number == 1 else data, str(file), number)
                text = None if line is None else self._field(line, f"{file}:{number}")
                if text is not None:
                    yield text

    def _field(self, line: str, where: str) -> str | None:
        """The text of a JSON line."""
        try:
            row = json.loads(line)
        except JSON_ERRORS as error:
            self._bad("not JSON", f"{where}: not JSON: {why_not_json(error)}")
            return None
        if not isinstance(row, dict) or self.text_field not in row:
            names = ", ".join(map(reprlib.repr, list(row)[:10])) if isinstance(row, dict) else ""
            has = f"it has {names or 'none'}" if isinstance(row, dict) else "it is not an object"
            self._bad("no text field", f"{where}: there is no field {self.text_field!r}; {has}")
            return None
        text = row[self.text_field]
        if not isinstance(text, str):
            self._bad("no text field", f"{where}: field {self.text_field!r} is a {type(text).__name__}, not a text")
        elif (place := surrogate(text)) is not None:
            code = f"\\u{ord(text[place]):04x}"
            self._bad("not Unicode", f"{where}: field {self.text_field!r} is not Unicode: half a pair, {code}")
        elif not text.strip():
            self.skipped["empty"] += 1
        else:
            return text
        return None


class _Writer:
    """The shards of one split."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self.directory, self.split, self.dtype, self.shard_tokens = directory, split, dtype, shard_tokens
        self.shards: list[dict] = []
        self.documents = self.bytes = 0
        self._file: BinaryIO | None = None

    def add(self, tokens: list[int], size: int) -> None:
        if self._file is None or self.shards[-1]["tokens"] >= self.shard_tokens:
            self.close()
            name = f"{self.split}-{len(self.shards):05}.bin"
            self._file = (self.directory / name).open("wb")
            self.shards.append({"file": name, "tokens": 0, "crc32": 0})
        shard, data = self.shards[-1], np.asarray(tokens, dtype=self.dtype).tobytes()
        with naming(self.directory / shard["file"]):
            self._file.write(data)
        shard["tokens"] += len(tokens)
        shard["crc32"] = zlib.crc32(data, shard["crc32"])
        self.documents += 1
        self.bytes += size

    def close(self) -> None:
        if self._file is not None:
            with naming(self.directory / self.shards[-1]["file"]):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
            self._file = None

    def summary(self) -> dict:
        tokens = sum(shard["tokens"] for shard in self.shards)
        return {"tokens": tokens, "documents": self.documents, "bytes": self.bytes, "shards": self.shards}


def is_validation(text: str, part: float) -> bool:
    """By the text itself: the same document falls on the same side wherever it lies, and its copies with it."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < part * 2**64


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    for document in documents:
        group.append(document)
        if len(group) == ENCODE_AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def prepare(
    source: Source,
    out: Path,
    *,
    tokenizer: Path | None = None,
    train_tokenizer: int | None = None,
    eod: str | None = None,
    validation: float = 0.02,
    shard_tokens: int = 2**28,
) -> dict:
    """Writes the dataset folder `out` and returns its description. Without a tokenizer: bytes."""
    if not 0 <= validation < 1:
        raise ValueError(f"tfla: validation is {validation}; it must be a part of the documents, from 0 to below 1")
    check_positive("shard_tokens", shard_tokens)
    if tokenizer is not None and train_tokenizer is not None:
        raise ValueError("tfla: train_tokenizer is given with tokenizer; one of them makes the tokens")
    if tokenizer is None and eod is not None:
        raise ValueError(f"tfla: eod is {eod!r} without tokenizer; it is the name of a token of a tokenizer.json")
    if out.exists():
        raise FileExistsError(f"tfla: {out} exists; give another folder, or remove it")
    with _partial(out) as partial:
        model: Tokenizer
        if tokenizer is not None:
            model = TokenizerFile.load(tokenizer, eod)
        elif train_tokenizer is not None:
            training = (text for text in source.documents() if not is_validation(text, validation))
            model = TokenizerFile.train(training, train_tokenizer)
        else:
            model = Bytes()
        dtype = np.dtype(np.uint16 if model.size <= 2**16 else np.uint32)
        splits = {name: _Writer(partial, name, dtype, shard_tokens) for name in ("train", "validation")}
        for texts in _groups(source.documents()):
            for text, tokens in zip(texts, model.encode(texts), strict=True):
                split = "validation" if is_validation(text, validation) else "train"
                splits[split].add([*tokens, model.eod], len(text.encode()))
        for writer in splits.values():
            writer.close()
        if not splits["train"].documents:
            raise ValueError(f"tfla: {', '.join(map(str, source.paths))} holds no document to train on")
        meta = {
            "format": FORMAT, "version": VERSION, "dtype": dtype.name, "vocab": model.size, "eod": model.eod,
            "tokenizer": model.save(partial), "splits": {name: writer.summary() for name, writer in splits.items()},
            "skipped": dict(source.skipped),
        }  # fmt: skip
        with naming(partial / META), (partial / META).open("w") as file:
            file.write(json.dumps(meta, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return meta


@contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """A folder beside `out` that gets its name when all is written, and otherwise is removed.

    What a killed process left there is removed; a living one holds a lock on it.
    """
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"tfla: {out} is being written by another process; wait for it, or stop it") from None
        except OSError:  # a file system without locks
            pass
        try:
            for old in partial.iterdir():
                old.unlink()
            yield partial
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(handle)
