"""Text that occurs twice: documents, and blocks of lines that differ in spaces, comment signs or numbers alone."""

from __future__ import annotations

import re
from hashlib import blake2b

from benchmarks.lm.corpus.text import SMALLEST, LeftOut

SHORTEST_BLOCK = 40  # letters and signs; shorter blocks are part of any text
LARGEST_REPEATED = 0.5  # of a document: what is left of it would be shreds
_BLOCKS = re.compile(r"\n[ \t]*\n")
_LEADING = re.compile(r"(?m)^[\s/*#;%.\"'!>|=-]+")
_DIGITS = re.compile(r"\d+")
_LICENCE = re.compile(
    r"(?i)permission is hereby granted|without (even the implied )?warrant(y|ies)|redistribution and use in source"
    r"|licensed under the|distributed under the (terms|boost)|free software foundation|all rights reserved"
    r"|this (file|program|library|code) is (free software|licensed|distributed)|spdx-license-identifier"
    r"|permission (is granted )?to (use|copy)|the software is provided .as is|use, modification,? and distribution"
)


def digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def normal(block: str) -> str:
    """What near-duplicates have in common."""
    return " ".join(_DIGITS.sub("0", _LEADING.sub("", block.lower())).split())


class Repeats:
    """Remembers all blocks it has seen, by eight bytes each."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.documents: set[int] = set()

    def without(self, text: str) -> str:
        """The text without blocks of earlier text and of licences."""
        whole = digest(text)
        if whole in self.documents:
            raise LeftOut("a copy")
        self.documents.add(whole)
        kept, new = [], []
        for block in _BLOCKS.split(text):
            if _LICENCE.search(block):
                continue
            essence = normal(block)
            if len(essence) >= SHORTEST_BLOCK:
                number = digest(essence)
                if number in self.blocks:
                    continue
                self.blocks.add(number)
                new.append(number)
            kept.append(block)
        result = "\n\n".join(kept).strip("\n") + "\n"
        if len(result) < max(SMALLEST, LARGEST_REPEATED * len(text)):
            self.blocks.difference_update(new)  # of a document that does not count
            raise LeftOut("mostly repeated")
        return result
