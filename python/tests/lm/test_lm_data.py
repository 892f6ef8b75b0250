"""Text to tokens: what a dataset holds, what a batch is, and every refusal with its file and line."""

import json

import numpy as np
import pytest
import torch

from lm_inputs import make_data, write_texts
from tfla.lm.data import Dataset, Order, make_batch
from tfla.lm.data.prepare import Source, prepare
from tfla.lm.data.tokenizer import Bytes, TokenizerFile, load, stream


def test_batch_begins_with_the_end_of_document():
    """The example of the paper's pipeline: 1 2 3 E 4 5 E and a place that is empty."""
    E = 9
    batch = make_batch(torch.tensor([[1, 2, 3, E, 4, 5, E, -1], [4, 4, 4, 4, 4, 4, 4, E]]), E)
    assert batch.inputs.tolist() == [[E, 1, 2, 3, E, 4, 5, E], [E, 4, 4, 4, 4, 4, 4, 4]]
    assert batch.documents.starts.tolist() == [[True, *[False] * 3, True, False, False, True], [True, *[False] * 7]]
    cu_seqlens = batch.documents.cu_seqlens.tolist()
    assert cu_seqlens[:5] == [0, 4, 7, 8, 16] and set(cu_seqlens[5:]) == {16} and len(cu_seqlens) == 64


def test_stretches_of_a_batch_are_its_columns():
    batch = make_batch(torch.arange(24).view(2, 12), 7)
    parts = [batch.stretch(rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([part.inputs for part in parts], 1), batch.inputs)
    assert torch.equal(torch.cat([part.documents.starts for part in parts], 1), batch.documents.starts)


@pytest.mark.parametrize("shard_tokens", [2**28, 200])
def test_dataset_holds_the_documents(tmp_path, shard_tokens):
    data = make_data(tmp_path, shard_tokens=shard_tokens)
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    found = []
    for split in ("train", "validation"):
        rows = Dataset(data, split, 50)
        assert (len(rows.meta["splits"][split]["shards"]) > 1) == (shard_tokens == 200)
        tokens = [token for row in range(rows.rows) for token in rows.batch([row]).targets[0].tolist() if token != -1]
        assert tokens == rows.stream(0, rows.tokens).tolist() and len(tokens) == rows.tokens
        documents = bytes(t if t < 256 else 0 for t in tokens).split(b"\0")
        assert documents.pop() == b""
        assert rows.bytes_per_token() == pytest.approx(sum(map(len, documents)) / len(tokens))
        found += [document.decode() for document in documents]
    assert sorted(found) == sorted(texts)
    assert 0 < rows.meta["splits"]["validation"]["documents"] < len(texts) / 2


def test_order_visits_every_row_once_in_an_epoch():
    order = Order(7, seed=3)
    epochs = [[order.row(7 * epoch + place) for place in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1]
    assert [Order(7, seed=3).row(n) for n in (12, 3)] == [epochs[1][5], epochs[0][3]]
    with pytest.raises(ValueError, match="not one row of context"):
        Order(0, seed=0)


def test_own_tokenizer(tmp_path):
    data = make_data(tmp_path, train_tokenizer=300)
    meta = json.loads((data / "dataset.json").read_text())
    assert meta["tokenizer"] == "tokenizer.json" and meta["vocab"] <= 300
    tokenizer = load("tokenizer.json", data)
    text = "the gate <|endoftext|> über 状態"
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.decode(tokens).decode() == text  # the name of a special token in a text is text
    assert tokenizer.eod not in tokens
    assert len(tokenizer.encode(["the state of a sequence"])[0]) < 12
    again = prepare(
        Source([tmp_path / "texts.jsonl"]), tmp_path / "again", tokenizer=data / "tokenizer.json", validation=0.2
    )
    assert again["splits"] == meta["splits"]
    with pytest.raises(ValueError, match="has no token <stop>"):
        TokenizerFile.load(data / "tokenizer.json", "<stop>")


@pytest.mark.parametrize("text", ["plain", "é状態🙂 end", ""])
def test_streaming_does_not_tear_characters(text):
    tokenizer = Bytes()
    parts = list(stream(tokenizer, tokenizer.encode([text])[0]))
    assert "".join(parts) == text and "\ufffd" not in "".join(parts)


def test_folders_and_counted_skips(tmp_path):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "left_out").mkdir()
    files = {"a.txt": b"one", "inner/b.txt": b"two\nlines", "c.txt": b"\xff\xfe", "d.txt": b" \n", "e.md": b"no"}
    for name, content in {**files, "left_out/f.txt": b"no"}.items():
        (folder / name).write_bytes(content)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "three"}\n{"text": "no"}\nnot json\n{"body": 4}\n\n')
    source = Source([folder, rows], ("*.txt",), ("left_out",), "body", skip_bad=True)
    assert list(source.documents()) == ["one", "two\nlines", "three"]
    meta = prepare(source, tmp_path / "data", validation=0)
    assert meta["splits"]["train"]["documents"] == 3
    assert meta["skipped"] == {"not UTF-8": 1, "empty": 2, "no text field": 2, "not JSON": 1}


BAD = [
    ({"a.txt": b"fine\nthen \xff"}, {}, r"a.txt:2: byte 0xff is not UTF-8"),
    ({"a.jsonl": b'{"text": "x"}\n{"text": "\xc3"}\n'}, {}, r"a.jsonl:2: byte 0xc3 is not UTF-8"),
    ({"a.jsonl": b'{"text": "x"}\n{"text": \n'}, {}, r"a.jsonl:2: not JSON: Expecting value at column 1"),
    ({"a.jsonl": b'{"body": "x", "id": 1}\n'}, {}, r"a.jsonl:1: there is no field 'text'; it has 'body', 'id'"),
    ({"a.jsonl": b"[1]\n"}, {}, r"a.jsonl:1: there is no field 'text'; it is not an object"),
    ({"a.jsonl": b'{"text": 3}\n'}, {}, r"a.jsonl:1: field 'text' is a int, not a text"),
    ({"a.txt": b""}, {}, r"holds no document to train on"),
    ({"a.md": b"x"}, {"include": ("*.txt",)}, r"has no file that matches \*.txt"),
    ({}, {"paths": ["nowhere"]}, r"nowhere does not exist"),
]


@pytest.mark.parametrize(("files", "options", "sentence"), BAD, ids=[row[2] for row in BAD])
def test_bad_sources_are_refused(tmp_path, files, options, sentence):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    paths = [tmp_path / name for name in options.pop("paths", ["texts"])]
    with pytest.raises((ValueError, FileNotFoundError), match=f"^tfla: .*{sentence}"):
        prepare(Source(paths, **options), tmp_path / "data", validation=0)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]  # nothing half-made is left


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"validation": 1.0}, "validation is 1.0"),
        ({"train_tokenizer": 100}, "train_tokenizer is 100"),
        ({"train_tokenizer": 300, "tokenizer": "x.json"}, "train_tokenizer is given with tokenizer"),
        ({"tokenizer": "texts.jsonl"}, "texts.jsonl is not a tokenizer.json"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, sentence):
    source = Source([write_texts(tmp_path / "texts.jsonl")])
    if "tokenizer" in options:
        options["tokenizer"] = tmp_path / options["tokenizer"]
    with pytest.raises(ValueError, match=sentence):
        prepare(source, tmp_path / "data", **options)


def cut_shard(data):
    file = data / "train-00000.bin"
    file.write_bytes(file.read_bytes()[:-1])


def remove_shard(data):
    (data / "train-00000.bin").unlink()


def cut_description(data):
    (data / "dataset.json").write_text((data / "dataset.json").read_text()[:40])


def other_format(data):
    (data / "dataset.json").write_text('{"format": "something", "version": 1}')


def remove_description(data):
    (data / "dataset.json").unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut_shard, r"train-00000.bin has \d+ bytes; dataset.json says \d+"),
        (remove_shard, "train-00000.bin is missing"),
        (cut_description, r"dataset.json:\d+: not JSON"),
        (other_format, "is 'something' version 1"),
        (remove_description, "is not a dataset: it has no dataset.json"),
    ],
)
def test_damaged_datasets_are_refused(tmp_path, damage, sentence):
    data = make_data(tmp_path)
    damage(data)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        Dataset(data, "train", 10)


def test_existing_folder_and_unknown_split(tmp_path):
    data = make_data(tmp_path)
    with pytest.raises(FileExistsError, match="data exists"):
        make_data(tmp_path)
    with pytest.raises(ValueError, match="split is 'test'"):
        Dataset(data, "test", 10)


def test_large_vocabularies_have_wider_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(Bytes, "size", 70000)
    data = make_data(tmp_path)
    assert Dataset(data, "train", 10).stream(0, 4).dtype == np.uint32
