"""Text to tokens and back: bytes, or a tokenizer.json through the tokenizers library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tfla.lm.checks import bare_name, naming

EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<eod>")
MOST_TRAINED = 2**24  # the library makes room for all of them at once, and ends the process where it cannot


def surrogate(text: str) -> int | None:
    """Where half a surrogate pair stands, which is no character and has no UTF-8; JSON and command lines have some."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def check_unicode(texts: Sequence[str]) -> None:
    for text in texts:
        if (place := surrogate(text)) is not None:
            raise ValueError(
                f"tfla: a text is not Unicode: its character {place} is half a surrogate pair, "
                "as bytes become that are not UTF-8"
            )


class Tokenizer(Protocol):
    size: int  # one more than the largest token, the end-of-document token among them
    eod: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, tokens: Sequence[int]) -> bytes: ...
    def save(self, directory: Path) -> str: ...


class Bytes:
    """Every byte of the UTF-8 text is a token; the token after the last byte is the end of a document."""

    size, eod = 257, 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        check_unicode(texts)
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(token for token in tokens if token < 256)

    def save(self, directory: Path) -> str:
        return "bytes"


class TokenizerFile:
    """A tokenizer.json. Names of special tokens inside a text are text."""

    def __init__(self, tokenizer: Any, eod: str | int | None = None, origin: str = "the tokenizer") -> None:
        names = (eod,) if isinstance(eod, str) else EOD_NAMES
        ids = [eod] if isinstance(eod, int) else [tokenizer.token_to_id(name) for name in names]
        found = next((token for token in ids if token is not None), None)
        if found is None:
            raise ValueError(f"tfla: {origin} has no token {' or '.join(names)}; name its end of document with --eod")
        size = 1 + max(tokenizer.get_vocab().values(), default=-1)  # numbers may have gaps
        if not 0 <= found < size:
            raise ValueError(f"tfla: {origin} has no token {found}, the end of a document; its tokens are below {size}")
        self.tokenizer, self.eod, self.size, self.origin = tokenizer, found, size, origin
        tokenizer.encode_special_tokens = True

    @staticmethod
    def read(path: Path) -> Any:
        library = _library()
        if not path.is_file():
            raise FileNotFoundError(f"tfla: {path} does not exist, or is not a file; it must be a tokenizer.json")
        try:
            return library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tfla: {path} is not a tokenizer.json: {error}") from None

    @classmethod
    def load(cls, path: Path, eod: str | int | None = None) -> TokenizerFile:
        return cls(cls.read(path), eod, str(path))

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> TokenizerFile:
        """A byte-level BPE, so that no text is without tokens."""
        library = _library()
        if not 257 <= size <= MOST_TRAINED:
            raise ValueError(f"tfla: train_tokenizer is {size}; a byte-level BPE has from 257 to {MOST_TRAINED} tokens")
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, special_tokens=[EOD_NAMES[0]], show_progress=False,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        check_unicode(texts)
        try:
            rows = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception, such as for a word it has no token for
            raise ValueError(f"tfla: {self.origin} cannot encode a text: {error}") from None
        return [row.ids for row in rows]

    def decode(self, tokens: Sequence[int]) -> bytes:
        known = [token for token in tokens if token < self.size]
        return self.tokenizer.decode(known, skip_special_tokens=True).encode()

    def save(self, directory: Path) -> str:
        file = directory / "tokenizer.json"
        with naming(file):
            file.write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")
        return file.name


def load(name: str, directory: Path, eod: int | None = None) -> Tokenizer:
    """The tokenizer that a dataset or a checkpoint names; its file lies in the same folder."""
    return Bytes() if name == "bytes" else TokenizerFile.load(directory / bare_name(name, directory), eod)


def same(ours: Path, theirs: Path) -> bool:
    """Whether two tokenizer.json hold the same tokenizer, however they are written."""
    if ours.read_bytes() == theirs.read_bytes():
        return True
    return TokenizerFile.read(ours).to_str() == TokenizerFile.read(theirs).to_str()


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ImportError("tfla: a tokenizer.json needs the package tokenizers; pip install tokenizers") from None
    return tokenizers


def stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Text as its tokens arrive: only whole characters, so that a character of several tokens is not torn."""
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending).decode(errors="replace")
        if not text.endswith("\ufffd") or len(pending) > 8:
            yield text
            pending.clear()
    if pending:
        yield tokenizer.decode(pending).decode(errors="replace")
