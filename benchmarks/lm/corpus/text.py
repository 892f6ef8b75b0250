"""From a file to the text that counts, or the reason why it does not."""

from __future__ import annotations

import gzip
import html
import re
import zlib
from pathlib import Path

LARGEST = 2_000_000  # bytes of a document; what is larger is data or generated
SMALLEST = 200
MOST_FOREIGN, FEWEST_LETTERS, LONGEST_MEAN_LINE = 0.1, 0.5, 200
_INVISIBLE = re.compile(r"(?is)<(script|style|head|nav|svg)\b.*?</\1\s*>|<!--.*?-->")
_BREAKS = re.compile(r"(?i)</?(p|div|li|ul|ol|dl|dt|dd|tr|table|h[1-6]|pre|section|article|blockquote|hr)\b[^>]*>")
_LINE = re.compile(r"(?i)<br\b[^>]*>")
_CELL = re.compile(r"(?i)</t[dh]\s*>")
_TAG = re.compile(r"<[a-zA-Z/!][^>]*>")


class LeftOut(Exception):
    """Its argument is the reason, as the manifest counts it."""


def read(path: Path) -> str:
    """The text of a file, with plain line ends."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        raise LeftOut("unreadable") from None
    if b"\0" in data:
        raise LeftOut("binary")
    if len(data) > 8 * LARGEST:
        raise LeftOut("too large")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise LeftOut("not UTF-8") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def plain(page: str) -> str:
    """What a browser shows of an HTML page, as paragraphs."""
    page = _INVISIBLE.sub(" ", page)
    page = _CELL.sub("\t", _LINE.sub("\n", _BREAKS.sub("\n\n", page)))
    lines = [line.rstrip() for line in html.unescape(_TAG.sub("", page)).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def manual(source: str) -> str:
    """The source of a manual without its comments, where licences stand."""
    return "\n".join(line for line in source.split("\n") if not re.match(r"^['.]\s*\\\"", line))


def clean(path: Path, kind: str) -> str:
    text = read(path)
    name = path.name.removesuffix(".gz")
    if name.endswith((".html", ".htm")):
        text = plain(text)
    elif kind == "manuals":
        text = manual(text)
        if text.count("\n") < 3:  # a line that refers to another page
            raise LeftOut("too short")
    text = text.strip("\n") + "\n"
    check(text)
    return text


def check(text: str) -> None:
    """Refuses what is not written by people: tables of numbers, other scripts, minified sources."""
    if len(text) < SMALLEST:
        raise LeftOut("too short")
    if len(text.encode()) > LARGEST:
        raise LeftOut("too large")
    visible = len(text) - sum(map(text.count, " \t\n"))
    if sum(map(str.isalpha, text)) < FEWEST_LETTERS * visible:
        raise LeftOut("mostly not letters")
    if len(text.encode()) - len(text) > MOST_FOREIGN * len(text):
        raise LeftOut("another script")
    if len(text) > LONGEST_MEAN_LINE * (text.count("\n") + 1) * (5 if "\n\n" in text else 1):
        raise LeftOut("lines too long")
