"""Texts, tokenizers and datasets that tfla.lm refuses: one sentence that names file, line and field."""

import fcntl
import json
import math
import os
import shutil
import zlib

import numpy as np
import pytest
import torch

from lm_inputs import make_data, word_tokenizer, write_texts
from tfla.lm.data import Dataset, Order
from tfla.lm.data.prepare import Source, prepare
from tfla.lm.data.tokenizer import TokenizerFile, load


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a dataset of bytes, and one of a tokenizer."""
    folder = tmp_path_factory.mktemp("data_refused")
    make_data(folder)
    prepare(Source([folder / "texts.jsonl"]), folder / "bpe", train_tokenizer=300, validation=0.2)
    return folder


# --- prepare

LINES = [
    (b'{"text": "half \\ud800 pair"}', "not Unicode", r"field 'text' is not Unicode: half a pair, \\ud800"),
    (b'{"text": "x", "n": ' + b"1" * 5000 + b"}", "not JSON", "a number has too many digits"),
    (b"[" * 200_000, "not JSON", "it is nested too deeply"),
    (b'{"text": ' + b'[' * 200_000, "not JSON", "it is nested too deeply"),
    (b'{"text": "\0"}', "not JSON", "Invalid control character at column 11;"),
    (b"\0" * 1000, "not JSON", "Expecting value"),
    (b'{"text": "\xed\xa0\x80"}', "not UTF-8", "byte 0xed is not UTF-8"),
    (b'\xef\xbb\xbf{"text": "x"}', "not JSON", "Unexpected UTF-8 BOM"),  # a mark in the middle of a file is none
    (b'{"text": null}', "no text field", "field 'text' is a NoneType, not a text"),
    (b'{"text": ["x"]}', "no text field", "field 'text' is a list, not a text"),
    (b"{" + b",".join(b'"%d": 0' % n for n in range(100_000)) + b"}", "no text field", "it has '0', .*, '9'; "),
    (b"{}", "no text field", "it has none"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "kind", "reason"), LINES, ids=[f"{row[2]}{len(row[0])}" for row in LINES])
def test_bad_lines(tmp_path, line, kind, reason):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "fine too"}\n')
    with pytest.raises(ValueError, match=rf"^tfla: .*a.jsonl:2: .*{reason}.*--skip-bad") as refusal:
        prepare(Source([file]), tmp_path / "data", validation=0)
    assert len(str(refusal.value)) < 500
    assert list(tmp_path.iterdir()) == [file]
    meta = prepare(Source([file], skip_bad=True), tmp_path / "data", validation=0, train_tokenizer=257)
    assert meta["skipped"] == {kind: 1} and meta["splits"]["train"]["documents"] == 2


def test_byte_order_marks_are_not_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbftwo\0\n")
    assert list(Source([tmp_path]).documents()) == ["one", "two\0\n"]


PREPARE = [
    ({"shard_tokens": 0}, "shard_tokens is 0; it must be a positive whole number"),
    ({"validation": math.nan}, "validation is nan"),
    ({"train_tokenizer": 2**40}, "train_tokenizer is 1099511627776"),
    ({"eod": "</s>"}, "eod is '</s>' without tokenizer"),
    ({"tokenizer": "nowhere.json"}, "nowhere.json does not exist"),
    ({"tokenizer": "narrow.json"}, "narrow.json cannot encode a text: .*UNK"),
]


@pytest.mark.parametrize(("options", "sentence"), PREPARE, ids=[row[1] for row in PREPARE])
def test_prepare_refuses(tmp_path, options, sentence):
    write_texts(tmp_path / "a.jsonl")
    word_tokenizer(tmp_path / "narrow.json", {"a": 0, "</s>": 1})
    if "tokenizer" in options:
        options = {"tokenizer": tmp_path / options["tokenizer"]}
    with pytest.raises((ValueError, FileNotFoundError), match=f"^tfla: .*{sentence}"):
        prepare(Source([tmp_path / "a.jsonl"]), tmp_path / "data", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "narrow.json"]


def test_sources_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"^tfla: include is '/etc/\*', which is no pattern of file names"):
        list(Source([str(tmp_path)], include=("/etc/*",)).documents())
    with pytest.raises(ValueError, match="^tfla: paths is empty"):
        Source([])


def test_prepare_beside_another_and_after_a_killed_one(tmp_path):
    write_texts(tmp_path / "a.jsonl")
    partial = tmp_path / ".data.partial"
    partial.mkdir()
    (partial / "train-00007.bin").write_bytes(b"of another")
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="data is being written by another process"):
        prepare(Source([tmp_path / "a.jsonl"]), tmp_path / "data")
    assert (partial / "train-00007.bin").exists()
    os.close(handle)  # as the end of its process does
    prepare(Source([tmp_path / "a.jsonl"]), tmp_path / "data")
    assert not partial.exists() and not (tmp_path / "data" / "train-00007.bin").exists()


# --- tokenizers


@pytest.mark.parametrize(
    ("largest", "dtype"), [(100, "uint16"), (65535, "uint16"), (65536, "uint32"), (70000, "uint32")]
)
def test_tokenizers_with_gaps(tmp_path, largest, dtype):
    file = word_tokenizer(tmp_path / "t.json", {"a": 0, "state": 7, "[UNK]": 2, "<|endoftext|>": largest})
    write_texts(tmp_path / "a.jsonl")
    meta = prepare(Source([tmp_path / "a.jsonl"]), tmp_path / "data", tokenizer=file, validation=0)
    assert (meta["vocab"], meta["eod"], meta["dtype"]) == (largest + 1, largest, dtype)
    data = Dataset(tmp_path / "data", "train", 16)
    tokens = data.stream(0, data.tokens)
    assert set(tokens.tolist()) == {0, 2, 7, largest} and tokens[-1] == largest
    tokenizer = load(meta["tokenizer"], tmp_path / "data", meta["eod"])
    assert tokenizer.decode([0, 50, 7, largest + 1]).decode() == "a state"
    with pytest.raises(ValueError, match=f"has no token {largest + 1}, the end of a document"):
        TokenizerFile.load(file, largest + 1)


@pytest.mark.parametrize("kind", ["bytes", "tokenizer.json"])
def test_a_text_that_is_not_unicode(place, kind):
    tokenizer = load(kind, place / "bpe")
    with pytest.raises(ValueError, match="^tfla: a text is not Unicode: its character 2 is half a surrogate pair"):
        tokenizer.encode(["fine", "ab\udcff"])


# --- datasets


def change(**fields):
    return lambda meta: meta | fields


def split(**fields):
    return lambda meta: meta | {"splits": {"train": meta["splits"]["train"] | fields}}


def shard(**fields):
    return split(shards=[{"file": "train-00000.bin", "tokens": 1} | fields])


def without(name):
    return lambda meta: {key: value for key, value in meta.items() if key != name}


META = [
    (lambda meta: [], r"dataset.json holds \[\]; it must hold an object"),
    (lambda meta: None, r"dataset.json holds None; it must hold an object"),
    *[(without(name), f"dataset.json has no {name}; ") for name in ("dtype", "vocab", "eod", "tokenizer", "splits")],
    (change(dtype="object"), "dataset.json: dtype is 'object'; it must be 'uint16' or 'uint32'"),
    (change(dtype=["uint16"]), r"dtype is \['uint16'\]"),
    (change(vocab=-1), "vocab is -1; it must be a whole number from 1 to 65536"),
    (change(vocab="x"), "vocab is 'x'"),
    (change(vocab=True), "vocab is True"),
    (change(vocab=257.0), "vocab is 257.0"),
    (change(vocab=65537), "vocab is 65537"),
    (change(eod=9999), "eod is 9999; it must be a token, a whole number from 0 to 256"),
    (change(eod=-1), "eod is -1"),
    (change(eod=None), "eod is None"),
    (change(tokenizer="../../payload"), "dataset.json names a file '../../payload'; it must be the bare name"),
    (change(tokenizer="/etc/passwd"), "names a file '/etc/passwd'"),
    (change(tokenizer=".metadata"), "tokenizer is '.metadata'; it must be"),
    (change(tokenizer="__0_0.distcp"), "tokenizer is '__0_0.distcp'; it must be 'bytes' or a file like"),
    (change(tokenizer="checkpoint.json"), "tokenizer is 'checkpoint.json'"),
    (change(tokenizer=3), "tokenizer is 3"),
    (change(splits=[]), r"splits is \[\]"),
    (change(splits={"train": 5}), "dataset.json has no splits.train.tokens"),
    (split(tokens="many"), "splits.train.tokens is 'many'"),
    (split(bytes=-3), "splits.train.bytes is -3"),
    (split(shards={}), "splits.train.shards is {}"),
    (split(shards=[]), r"splits.train.tokens is \d+; its shards have 0"),
    (shard(file="../x.bin"), "names a file '../x.bin'"),
    (shard(tokens=-1), "splits.train.shards.0.tokens is -1"),
    (shard(crc32="x"), "splits.train.shards.0.crc32 is 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "sentence"), META, ids=[row[1] for row in META])
def test_damaged_descriptions(place, tmp_path, damage, sentence):
    data = shutil.copytree(place / "data", tmp_path / "data")
    meta = json.loads((data / "dataset.json").read_text())
    (data / "dataset.json").write_text(json.dumps(damage(meta)))
    with pytest.raises(ValueError, match=f"^tfla: .*{sentence}") as refusal:
        Dataset(data, "train", 10)
    assert "dataset.json" in str(refusal.value)


def rewrite(file, tokens):
    """One token at the place 50 of a shard."""
    content = np.fromfile(file, np.uint16)
    content[50 : 50 + len(tokens)] = tokens
    content.tofile(file)


@pytest.mark.parametrize("damaged", ["train", "validation"])
def test_corrupt_shards_are_refused_before_the_first_row(place, tmp_path, damaged):
    data = shutil.copytree(place / "data", tmp_path / "data")
    rows = Dataset(data, "train", 10)
    fingerprint = rows.fingerprint()
    rewrite(data / f"{damaged}-00000.bin", [3])
    with pytest.raises(ValueError, match=f"{damaged}-00000.bin does not have its checksum; the dataset is damaged"):
        rows.batch([0])
    with pytest.raises(ValueError, match=f"{damaged}-00000.bin does not have its checksum"):
        Dataset(data, damaged, 10).stream(0, 1)  # far from the place
    shutil.rmtree(data)
    texts = json.loads((place / "texts.jsonl").read_text().splitlines()[0])["text"]
    (tmp_path / "texts.jsonl").write_text((place / "texts.jsonl").read_text().replace(texts, texts[::-1]))
    prepare(Source([tmp_path / "texts.jsonl"]), data, validation=0.2)
    assert Dataset(data, "train", 10).fingerprint() != fingerprint


def test_datasets_without_checksums(place, tmp_path):
    """As they were made before: the fingerprint of a run on them stays, and tokens out of bounds are still seen."""
    data = shutil.copytree(place / "data", tmp_path / "data")
    meta = json.loads((data / "dataset.json").read_text())
    for summary in meta["splits"].values():
        for entry in summary["shards"]:
            assert zlib.crc32((data / entry["file"]).read_bytes()) == entry.pop("crc32")
    (data / "dataset.json").write_text(json.dumps(meta, indent=1) + "\n")
    rows = Dataset(data, "train", 10)
    assert rows.fingerprint() == zlib.crc32((data / "dataset.json").read_bytes())
    assert torch.equal(rows.batch([5]).targets, Dataset(place / "data", "train", 10).batch([5]).targets)
    rewrite(data / "train-00000.bin", [257])
    rows.batch([4])
    with pytest.raises(
        ValueError, match="train-00000.bin has a token 257; dataset.json says that tokens are below 257"
    ):
        rows.batch([5])


@pytest.mark.parametrize("context", [0, -1, 2.5, True, None])
def test_context_of_a_dataset(place, context):
    with pytest.raises(ValueError, match=f"context is {context}; it must be a positive whole number"):
        Dataset(place / "data", "train", context)


def test_orders_of_any_seed():
    rows = [Order(50, seed).row(0) for seed in (0, -1, 2**50, 2**70)]
    assert all(0 <= row < 50 for row in rows)
