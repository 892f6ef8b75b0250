"""benchmarks/lm/corpus on a tree of made-up files: what is left out, what counts twice, and that it is repeatable."""

import gzip
import json
import random
import stat
import sys

import numpy as np
import pytest

from lm_inputs import ROOT, WORDS
from tfla.lm.data import Dataset

sys.path.append(str(ROOT))

from benchmarks.lm.corpus import collect, kinds, make, pack, text  # noqa: E402
from benchmarks.lm.corpus.__main__ import main  # noqa: E402
from benchmarks.lm.corpus.repeats import Repeats  # noqa: E402


def prose(seed, paragraphs=6):
    generator = random.Random(seed)
    lines = [" ".join(generator.choices(WORDS, k=12)) for _ in range(3 * paragraphs)]
    return "\n\n".join("\n".join(lines[j : j + 3]) for j in range(0, len(lines), 3)) + "\n"


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "root"
    docs = root / "usr/share/doc"
    for j in range(30):
        write(docs / f"package{j}/README.gz", prose(j))
        write(root / f"usr/include/header{j}.h", "\n\n".join(f"// {p}" for p in prose(100 + j).split("\n\n")))
    write(docs / "copy/README", prose(0))
    write(docs / "package1/copyright", prose(200))
    write(docs / "package1/changelog.gz", prose(201))
    write(docs / "package1/de/README", prose(202))
    write(docs / "package1/data.txt", prose(203).encode() + b"\0")
    write(docs / "package1/old.txt", prose(204).encode() + b"\xe9")
    write(root / "usr/share/man/man1/tool.1.gz", '.\\" Permission is hereby granted\n.TH TOOL 1\n' + prose(205))
    write(root / "usr/share/man/man1/alias.1.gz", ".so man1/tool.1\n")
    return root


def test_same_files_give_the_same_corpus_and_it_travels(tree, tmp_path):
    results = []
    for name in ("a", "b"):
        work = tmp_path / name
        said = []
        manifest = make.make(work, said.append, roots=[tree], packages=(), vocabulary=300, validation=0.2)
        results.append(manifest)
        assert json.loads((work / "corpus.json").read_text()) == manifest
        assert manifest["packed"]["sha256"] == pack.sha256(work / "corpus.tar.xz")
    assert results[0] == results[1]
    found = results[0]["kinds"]
    assert {name: part["documents"] for name, part in found.items()} == {
        "documentation": 30, "manuals": 1, "python": 0, "c": 30, "scripts": 0,
    }  # fmt: skip
    assert found["documentation"]["left_out"] == {
        "a copy": 1, "binary": 1, "not UTF-8": 1, "bytes of repeated blocks": 0,
    }  # fmt: skip
    assert found["manuals"]["left_out"]["too short"] == 1
    for split in ("train", "validation"):
        assert sum(part["tokens"][split] for part in found.values()) == results[0]["tokens"][split] > 0
    pack.unpack(tmp_path / "a/corpus.tar.xz", tmp_path / "there")
    for split in ("train", "validation"):
        data, there = (Dataset(folder, split, 8) for folder in (tmp_path / "a/dataset", tmp_path / "there"))
        assert np.array_equal(data.stream(0, data.tokens), there.stream(0, there.tokens))
        assert there.fingerprint() == data.fingerprint() == int(results[0]["fingerprint"], 16)


def test_tokens_of_a_kind_are_those_of_its_documents(tree, tmp_path):
    manifest = make.make(tmp_path / "a", print, roots=[tree], packages=(), vocabulary=300, validation=0.2)
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "a/dataset/tokenizer.json"))
    for name, part in manifest["kinds"].items():
        documents = [json.loads(line)["text"] for line in (tmp_path / f"a/text/{name}.jsonl").open()]
        tokens = sum(len(tokenizer.encode(document).ids) + 1 for document in documents)
        assert tokens == sum(part["tokens"].values())


def test_an_interrupted_call_goes_on(tree, tmp_path, monkeypatch):
    whole = make.make(tmp_path / "a", print, roots=[tree], packages=(), vocabulary=300, validation=0.2)
    clean, seen = text.clean, []

    def interrupted(path, kind):
        if kind == "c":
            raise KeyboardInterrupt
        return clean(path, kind)

    monkeypatch.setattr(text, "clean", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make.make(tmp_path / "b", print, roots=[tree], packages=(), vocabulary=300, validation=0.2)
    monkeypatch.setattr(text, "clean", lambda path, kind: seen.append(kind) or clean(path, kind))
    assert make.make(tmp_path / "b", print, roots=[tree], packages=(), vocabulary=300, validation=0.2) == whole
    assert set(seen) == {"c"}  # and nothing of the kinds before it


def test_blocks_count_once_whatever_their_numbers_and_comment_signs():
    repeats = Repeats()
    shared = "the state of version 12 is kept in a matrix\nand read by a query of version 13"
    first = repeats.without(f"{prose(1)}\n\n{shared}\n")
    assert shared in first
    again = repeats.without(
        f"{prose(2)}\n\n# the state of version 7 is  kept in a matrix\n# and read by a Query of version 8\n"
    )
    assert again == prose(2)
    other = "the state of a version is kept in a matrix\nand read by a query of version 13"
    assert other in repeats.without(f"{prose(3)}\n\n{other}\n")
    assert "}\n\n}" in repeats.without("}\n\n}\n\n" + prose(4))  # what is short is part of any text
    licence = "Permission is hereby granted, free of charge,\nto any person"
    assert "granted" not in repeats.without(f"{licence}\n\n{prose(5)}")
    with pytest.raises(text.LeftOut, match="a copy"):
        repeats.without(f"{licence}\n\n{prose(5)}")
    with pytest.raises(text.LeftOut, match="mostly repeated"):
        repeats.without(prose(1) + "\n\n" + prose(6, 1))
    assert prose(6, 1) in repeats.without(prose(6, 1) + "\n\n" + prose(7))  # a document that is dropped leaves nothing


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("short", "too short"),
        ("1 2 3 4 5 6 7 8 9 0 " * 40 + "\n" + "words of it\n" * 4, "mostly not letters"),
        ("\u0431\u0443\u043a\u0432\u044b \u0441\u043b\u043e\u0432 " * 40, "another script"),
        ("var a=b;function(c){return d};" * 40, "lines too long"),
        ("word\n" * 500_000, "too large"),
    ],
)
def test_what_people_have_not_written_is_left_out(content, reason):
    with pytest.raises(text.LeftOut, match=reason):
        text.check(content)
    text.check(prose(1))


def test_a_page_is_what_a_browser_shows():
    page = "<html><head><title>no</title></head><p>a &lt;b&gt; <b>c</b><script>no()</script><br/>d</p><!-- no --><p>e"
    assert text.plain(page).split() == ["a", "<b>", "c", "d", "e"]
    assert "\n\n" in text.plain(page) and "no" not in text.plain(page)


def test_of_a_page_and_its_source_only_the_source_counts(tmp_path):
    html = tmp_path / "usr/share/doc/x/html"
    for name in ("tutorial/a.html", "tutorial/b.html", "_sources/tutorial/a.rst.txt"):
        write(html / name, prose(1))
    found = [name.removeprefix("usr/share/doc/x/html/") for name, _ in kinds.files(kinds.KINDS[0], [tmp_path])]
    assert sorted(found) == ["_sources/tutorial/a.rst.txt", "tutorial/b.html"]


def test_a_kind_ends_at_its_size(tree, tmp_path):
    few = kinds.Kind("documentation", ("usr/share/doc",), "README", 0)
    assert collect.gather(few, [tree], Repeats(), tmp_path / "out", print)["documents"] == 0


def test_packages_are_fetched_once_and_not_installed(tmp_path, monkeypatch):
    programs = {
        "apt-get": 'case $3 in absent) echo "E: Unable to locate absent" >&2; exit 100;; esac; echo x >$3_1.deb',
        "dpkg-deb": 'case $1 in -x) mkdir -p "$3/usr"; cp "$2" "$3/usr/file";; -f) echo 1.0-2;; esac',
    }
    for name, body in programs.items():
        path = write(tmp_path / "bin" / name, f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    said = []
    assert collect.fetch(("some-doc",), tmp_path / "packages", said.append) == {"some-doc": "1.0-2"}
    assert (tmp_path / "packages/some-doc/usr/file").read_text() == "x\n"
    assert collect.fetch(("some-doc",), tmp_path / "packages", said.append) == {"some-doc": "1.0-2"}
    assert said == ["fetching some-doc"]
    with pytest.raises(RuntimeError, match="tfla: package absent cannot be fetched: E: Unable to locate"):
        collect.fetch(("absent",), tmp_path / "packages", said.append)


def test_an_archive_that_leads_elsewhere_is_refused(tmp_path, capsys):
    import io
    import lzma
    import tarfile

    with lzma.open(tmp_path / "bad.tar.xz", "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    assert main(["unpack", str(tmp_path / "bad.tar.xz"), str(tmp_path / "in/out")]) == 2
    assert "an entry '../outside'" in capsys.readouterr().err and not (tmp_path / "in/outside").exists()
    (tmp_path / "taken").mkdir()
    assert main(["unpack", str(tmp_path / "bad.tar.xz"), str(tmp_path / "taken")]) == 2
