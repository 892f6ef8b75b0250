"""What the corpus consists of: kinds of files by folder and name, and the Debian packages that are fetched for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

# Fetched and unpacked into the corpus's own folder, never installed: documentation that a machine seldom has.
PACKAGES = (
    "apache2-doc", "bash-doc", "cmake-doc", "debian-policy", "debian-reference-en", "developers-reference", "git-doc",
    "glibc-doc", "gnuplot-doc", "libboost1.74-doc", "linux-doc-6.1", "llvm-14-doc", "octave-doc", "perl-doc",
    "postgresql-doc-15", "python-django-doc", "python3.11-doc", "r-doc-html", "rust-doc", "sqlite3-doc", "vim-doc",
)  # fmt: skip
# Copies of licences, lists of changes, indices, and the thousands of pages that one program has generated.
NAMES_LEFT_OUT = re.compile(
    r"(?i)^(copyright|copying.*|licen[cs]e.*|(l?gpl|agpl|apache|mpl|bsd)[-_.0-9a-z]*|changelog.*|changes(\.old)?(\.gz)?"
    r"|authors.*|thanks.*|genindex.*|searchindex.*|gcloud_.*|search\.html|all\.html|implementors.*|py-modindex.*)$"
)
OTHER_LANGUAGES = re.compile(
    r"[/.](ar|bg|ca|cs|da|de|el|es|fi|fr|he|hr|hu|id|it|ja|jp|ko|nb|nl|pl|pt|pt[-_][A-Za-z]+|ro|ru|sk|sr|sv|tr|uk|vi|zh"
    r"|zh[-_][A-Za-z]+|it_IT|ja_JP|ko_KR|sp_SP|translations)([/.]|$)"
)


@dataclass(frozen=True)
class Kind:
    name: str
    folders: tuple[str, ...]  # below a root
    names: str  # a regular expression of whole file names; the ending .gz is not part of them
    megabytes: int  # of text at most
    code: bool = False


KINDS = (
    Kind("documentation", ("usr/share/doc",), r".*\.(txt|html?|rst|md|pod|tex|texi)|README.*|NEWS.*|FAQ.*|TODO.*", 55),
    Kind("manuals", ("usr/share/man",), r".*\.[1-9][a-z]*", 15),
    Kind("python", ("usr/lib/python3", "usr/lib/python3.11", "usr/share/doc"), r".*\.py", 30, code=True),
    Kind(
        "c", ("usr/include", "usr/lib/gcc", "usr/lib/llvm-14", "usr/share/doc"),
        r".*\.(h|hh|hpp|c|cc|cpp|cxx|inc|tcc)", 33, code=True,
    ),
    Kind(
        "scripts", ("usr/share/perl", "usr/share/perl5", "usr/share/cmake-3.25", "usr/share/vim", "usr/share/doc"),
        r".*\.(pm|pl|pod|cmake|vim|sh|awk|tcl|lua)", 16, code=True,
    ),
)  # fmt: skip


def left_out(relative: str) -> bool:
    return bool(NAMES_LEFT_OUT.match(relative.rpartition("/")[2]) or OTHER_LANGUAGES.search(relative))


def files(kind: Kind, roots: list[Path]) -> Iterator[tuple[str, Path]]:
    """(name below its root, file) of a kind, in an order that their names decide and that mixes all packages.

    Of a page and the source it was made from (Sphinx keeps it beside the page) only the source counts.
    """
    found: dict[str, Path] = {}
    for root in roots:
        for folder in kind.folders:
            for path in (root / folder).rglob("*"):
                relative = path.relative_to(root).as_posix()
                name = path.name.removesuffix(".gz")
                if re.fullmatch(kind.names, name) and not left_out(relative) and relative not in found:
                    if not path.is_symlink() and path.is_file() and not _has_source(path):
                        found[relative] = path
    yield from sorted(found.items(), key=lambda item: blake2b(item[0].encode(), digest_size=8).digest())


def _has_source(path: Path) -> bool:
    if path.suffix != ".html":
        return False
    for up, folder in enumerate(path.parents):
        sources = folder / "_sources"
        if sources.is_dir():
            stem = path.relative_to(folder).with_suffix("")
            return any((sources / f"{stem}{ending}").exists() for ending in (".rst.txt", ".txt", ".rst", ".md.txt"))
        if up == 5:
            break
    return False
