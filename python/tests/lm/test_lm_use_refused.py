"""What evaluation, generation, import and the command line refuse: one sentence, before any work is lost."""

import errno
import json
import math
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm_inputs import EOD, PROMPTS, make_data, small_model, word_tokenizer, write_texts
from tfla.lm import LanguageModel, convert
from tfla.lm.cli import main
from tfla.lm.commands import bench
from tfla.lm.commands import prepare as prepare_command
from tfla.lm.data import Dataset
from tfla.lm.data.prepare import Source, prepare
from tfla.lm.evaluate import check_tokens, evaluate
from tfla.lm.generate import Sampling, Session, generate
from tfla.lm.training.checkpoint import save_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(small_model()).eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory, model):
    """A folder with a dataset of bytes, one of a tokenizer, a checkpoint on bytes, and one without a tokenizer."""
    folder = tmp_path_factory.mktemp("refused")
    data = make_data(folder)
    prepare(Source([folder / "texts.jsonl"]), folder / "bpe", train_tokenizer=300, validation=0.2)
    about = {"recipe": {"context": 32}, "data": None, "tokenizer_json": None}
    known = {"data_path": str(data), "tokenizer": "bytes", "eod": EOD, "tokens": 257}
    save_model(folder / "run", model, {**about, **known})
    save_model(folder / "bare", model, {**about, **dict.fromkeys(known), "tokens": 320})
    convert.export(model, folder / "weights", "huggingface")
    return folder


# --- evaluation


def test_data_of_another_tokenizer(place, tmp_path, model):
    data, bpe = Dataset(place / "data", "validation", 32), Dataset(place / "bpe", "validation", 32)
    on_bytes = {"tokenizer": "bytes", "eod": EOD}
    on_file = {"tokenizer": "t.json", "eod": bpe.eod}
    text = (place / "bpe" / "tokenizer.json").read_text()
    (tmp_path / "t.json").write_text(json.dumps(json.loads(text)))  # the same, written otherwise
    assert (tmp_path / "t.json").read_text() != text
    for rows, meta in ((data, on_bytes), (bpe, on_file), (bpe, {"tokenizer": None, "eod": None})):
        check_tokens(rows, tmp_path, meta)
    refused = {
        "bpe has tokens of tokenizer.json, .* of bytes": (bpe, on_bytes),
        "data has tokens of bytes, .* of t.json": (data, on_file),
        f"bpe ends documents with token {bpe.eod}, .* with 5": (bpe, on_file | {"eod": 5}),
        "names a file '../t.json'": (bpe, on_file | {"tokenizer": "../t.json"}),
    }
    for sentence, (rows, meta) in refused.items():
        with pytest.raises(ValueError, match=f"^tfla: .*{sentence}"):
            check_tokens(rows, tmp_path, meta)
    word_tokenizer(tmp_path / "t.json", {"[UNK]": 0, "<|endoftext|>": 1})
    with pytest.raises(
        ValueError, match="bpe/tokenizer.json is another tokenizer than .*t.json; prepare the text with"
    ):
        check_tokens(bpe, tmp_path, on_file)


def test_evaluate_refuses(place, model):
    data = Dataset(place / "data", "validation", 32)
    for options, sentence in (
        ({"batch": 0}, "batch is 0"),
        ({"max_rows": 0}, "rows is 0"),
        ({"max_rows": -1}, "rows is"),
    ):
        with pytest.raises(ValueError, match=sentence):
            evaluate(model, data, **options)
    with pytest.raises(ValueError, match="data has tokens up to 256; the model has 64"):
        evaluate(LanguageModel(small_model(vocab=64)), data)


# --- generation

SAMPLING = [
    *[({"temperature": value}, "temperature is") for value in (math.nan, math.inf, -1.0, "hot")],
    *[({"top_p": value}, "top_p is") for value in (0.0, math.nan, 1.1, -1.0)],
    *[({"top_k": value}, "top_k is") for value in (0, -1, 2.5)],
]


@pytest.mark.parametrize(("options", "sentence"), SAMPLING, ids=str)
def test_sampling_refuses(options, sentence):
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        Sampling(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-10])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 2}, {"top_p": 1e-30}], ids=str)
def test_the_smallest_temperatures_are_greedy(temperature, options, dtype):
    logits = torch.tensor([[3.0, 30.0, 29.0, -math.inf], [-9.0, -30.0, -8.0, -math.inf]], dtype=dtype)
    tokens = Sampling(temperature, **options).choose(logits, torch.Generator().manual_seed(0))
    assert tokens.tolist() == [1, 2]


def test_the_largest_temperature_keeps_what_is_not_allowed_out():
    logits = torch.tensor([0.0, 1.0, -math.inf]).expand(3000, 3)
    tokens = Sampling(1e308).choose(logits, torch.Generator().manual_seed(0))
    assert tokens.bincount().tolist() == pytest.approx([1500, 1500], abs=140)


GENERATE = [
    ({"max_tokens": -5}, "max_tokens is -5"),
    ({"max_tokens": 2.5}, "max_tokens is 2.5"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**70}, "seed is 1180591620717411303424"),
    ({"stop": {-1}}, "stop has a token -1; tokens of the model are from 0 to 319"),
    ({"stop": [320]}, "stop has a token 320"),
    ({"allowed": 0}, "allowed is 0"),
]


@pytest.mark.parametrize(("options", "sentence"), GENERATE, ids=[row[1] for row in GENERATE])
def test_generate_refuses_at_once(model, options, sentence):
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        generate(Session(model, PROMPTS), **{"max_tokens": 3, **options})  # no token is asked for


def test_tokens_and_logits_out_of_bounds(model):
    for prompts, token in (([[320]], 320), ([[1], [2, -1]], -1)):
        with pytest.raises(ValueError, match=f"prompts has a token {token}; tokens of the model are from 0 to 319"):
            Session(model, prompts)
    session = Session(model, [[1]])
    with pytest.raises(ValueError, match="prompts has a token 999"):
        session.feed([[999]])
    session.logits = session.logits.clone().fill_(math.nan)
    with pytest.raises(ValueError, match="logits of the model are not numbers"):
        generate(session, 1)


SESSIONS = [
    (lambda content: content.pop("model"), "does not say its model"),
    (lambda content: content["model"].update(dim=64), "is of a model with dim 64; this one has 32"),
    (lambda content: content["model"].update(new=1), "is of a model with new 1; this one has None"),
    (lambda content: content.pop("logits"), r"logits of .* are not \(sequences, 320\)"),
    (lambda content: content.update(logits=torch.zeros(4, 3)), r"logits of .* are not \(sequences, 320\)"),
    (lambda content: content["states"].pop(), "has not 2 states, one for each layer"),
    (lambda content: content["states"][1].pop("m"), "the state of layer 1 in .* is not one of this model"),
    (lambda content: content["states"][0].update(C=torch.zeros(2)), "the state of layer 0 in .* is not one of this"),
    (lambda content: content.update(logits=torch.zeros(9, 320)), "the state of layer 0 in .* is not one of this"),
    (lambda content: content.update(format="x"), "is not a saved session"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "sentence"), SESSIONS, ids=[row[1] for row in SESSIONS])
def test_damaged_sessions(tmp_path, model, damage, sentence):
    Session(model, PROMPTS).save(tmp_path / "s.pt")
    content = torch.load(tmp_path / "s.pt", weights_only=True)
    damage(content)
    torch.save(content, tmp_path / "s.pt")
    with pytest.raises(ValueError, match=f"^tfla: .*{sentence}"):
        Session.load(model, tmp_path / "s.pt")


def test_a_session_that_cannot_be_saved_leaves_the_one_before(tmp_path, model, monkeypatch):
    session = Session(model, PROMPTS)
    session.save(tmp_path / "s.pt")
    before = (tmp_path / "s.pt").read_bytes()

    def full(content, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device: '.*s.pt'"):
        session.save(tmp_path / "s.pt")
    assert (tmp_path / "s.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


# --- import


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def weights(damage):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        damage(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def reshape(name, *shape):
    return weights(lambda tensors: tensors.update({name: torch.zeros(shape)}))


INDEX = "model.safetensors.index.json"
Q, GATE = "backbone.blocks.0.mlstm_layer.q.weight", "backbone.blocks.0.mlstm_layer.igate_preact.bias"
IMPORTS = [
    (write("config.json", "{"), r"config.json:1: not JSON: Expecting property name"),
    (write("config.json", "[]"), r"config.json holds \[\]; it must hold an object"),
    (write("config.json", "[" * 100_000), "config.json: not JSON: it is nested too deeply"),
    (lambda folder: (folder / "config.json").write_bytes(b"\xff"), "config.json: not JSON: it is not UTF-8"),
    (write("config.json", '{"gate_soft_cap": null}'), "config.json: gate_soft_cap is None; it must be"),
    (write("config.json", '{"eps": NaN}'), "config.json: eps is nan"),
    (write("config.json", '{"norm_eps": "small"}'), "config.json: norm_eps is 'small'"),
    (write("config.json", '{"output_logit_soft_cap": -30}'), "config.json: output_logit_soft_cap is -30"),
    (write(INDEX, "{"), "index.json:1: not JSON"),
    (write(INDEX, "{}"), "index.json has no weight_map"),
    (write(INDEX, '{"weight_map": ["x"]}'), "index.json has no weight_map"),
    (write(INDEX, '{"weight_map": {"x": "../model.safetensors"}}'), "index.json names a file '../model.safetensors'"),
    (write(INDEX, '{"weight_map": {"x": "/etc/passwd"}}'), "index.json names a file '/etc/passwd'"),
    (write(INDEX, '{"weight_map": {"x": 3}}'), "index.json names a file 3"),
    (write(INDEX, '{"weight_map": {"x": "two.safetensors"}}'), "two.safetensors is missing; the index names it"),
    (write("model.safetensors", "x" * 100), "model.safetensors is not safetensors, or it was cut off"),
    (lambda folder: (folder / "config.json").unlink(), "has neither config.json nor config.yaml"),
    (weights(lambda tensors: tensors.pop(Q)), f"has no weight {Q}"),
    (weights(lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)})), f"{Q} of .* is torch.int8"),
    (reshape(Q, 16), rf"{Q} of .* has shape \(16,\); it must have 2 axes"),
    (reshape(GATE, 2, 2), rf"{GATE} of .* has shape \(2, 2\); it must have 1 axes"),
    (reshape("backbone.embeddings.weight", 320, 0), r"has shape \(320, 0\)"),
    (reshape(GATE, 5), "has weights of sizes that do not fit: qk_factor makes 16 of dim 32"),
    (reshape("backbone.embeddings.weight", 1, 2**21), "dim is 2097152; it must be positive and at most"),
    (reshape("backbone.blocks.999999999.ffn.proj_up.weight", 1), "has no weight backbone.blocks.2"),
    (reshape("backbone.blocks.99999999999.ffn.proj_up.weight", 1), "has a weight backbone.blocks.99999999999"),
    (reshape("backbone.blocks.0.mlstm_layer.qkv_opreact.weight", 7, 32), r"qkv_opreact.weight of .* has shape \(7"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "sentence"), IMPORTS, ids=[row[1] for row in IMPORTS])
def test_damaged_weights_to_import(place, tmp_path, damage, sentence, capsys):
    folder = shutil.copytree(place / "weights", tmp_path / "in")
    damage(folder)
    assert main(["import", str(folder), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("tfla: ") and message.count("\n") == 1
    with pytest.raises((ValueError, FileNotFoundError), match=f"^tfla: .*{sentence}"):
        convert.import_model(folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["a: [", "", "- x\n", "\t\0"])
def test_damaged_yaml(place, tmp_path, text):
    folder = shutil.copytree(place / "weights", tmp_path / "in")
    (folder / "config.json").unlink()
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match="^tfla: .*config.yaml (is not YAML|holds)"):
        convert.import_model(folder)


def test_an_export_that_fails_leaves_nothing(tmp_path, model, monkeypatch):
    monkeypatch.setattr(convert._safetensors(), "save_file", lambda *_, **__: (tmp_path / "out" / "x").mkdir() or 1 / 0)
    with pytest.raises(ValueError, match="model.safetensors cannot be written: division by zero"):
        convert.export(model, tmp_path / "out", "xlstm")
    assert not (tmp_path / "out").exists()


# --- the command line

EVAL, TEXT, BENCH = "eval run --device cpu ", "generate run the --device cpu --max-tokens 2 ", "bench --device cpu "
COMMANDS = [
    (EVAL + "--batch 0", "batch is 0"),
    (EVAL + "--batch -2", "batch is -2"),
    (EVAL + "--rows 0", "rows is 0"),
    (EVAL + "--rows -1", "rows is -1"),
    (EVAL + "--context 0", "context is 0"),
    (EVAL + "--context -4", "context is -4"),
    (EVAL + "--chunk-size 0", "chunk_size is 0"),
    (EVAL + "--chunk-size -8", "chunk_size is -8"),
    (EVAL + "--split test", "data has train and validation"),
    (EVAL + "--json nowhere/x.json", "json is nowhere/x.json; there is no folder nowhere"),
    (EVAL + "--json data", "json is data, a folder; it must be a file"),
    (EVAL + "--data bpe", "bpe has tokens of tokenizer.json"),
    (EVAL + "--data nowhere", "nowhere is not a dataset"),
    ("eval bare --device cpu", "bare does not say what it was trained on; give a dataset with --data"),
    ("eval run --device tpu", "device is 'tpu'; it must be 'cpu', 'cuda' or 'cuda:' and a number"),
    ("eval run --device meta", "device is 'meta'; it must be 'cpu', 'cuda' or 'cuda:' and a number"),
    ("eval run --device cuda:99", "device is 'cuda:99'; torch finds"),
    ("generate run the --device tpu", "device is 'tpu'"),
    ("generate bare the --device cpu", "bare has no tokenizer"),
    (TEXT + "--temperature nan", "temperature is nan"),
    (TEXT + "--temperature inf", "temperature is inf"),
    (TEXT + "--temperature -1", "temperature is -1.0"),
    (TEXT + "--top-p 0", "top_p is 0.0"),
    (TEXT + "--top-p nan", "top_p is nan"),
    (TEXT + "--top-k 0", "top_k is 0"),
    (TEXT + "--max-tokens -5", "max_tokens is -5"),
    (TEXT + "--seed -1", "seed is -1"),
    (TEXT + f"--seed {2**70}", "seed is 11805916"),
    (TEXT + "--stop-tokens -1", "stop has a token -1"),
    (TEXT + "--save-state nowhere/s.pt", "save_state is nowhere/s.pt; there is no folder nowhere"),
    (TEXT + "--save-state .", "save_state is ., a folder"),
    (TEXT + "--state data/dataset.json", "data/dataset.json is not a saved session"),
    (TEXT + "--state nowhere.pt", "nowhere.pt does not exist"),
    (TEXT + "--state data", "data: Is a directory"),
    ("generate run \udcff --device cpu", "a text is not Unicode"),
    (BENCH + "--batch 0", "batch is 0"),
    (BENCH + "--steps -1", "steps is -1"),
    (BENCH + "--context 0", "context is 0"),
    (BENCH + "--layers 0", "layers is 0"),
    (BENCH + "--vocab -3", "vocab is -3"),
    (BENCH + "--sizes tiny,2b", "preset is '2b'"),
    (BENCH + "--sizes ,", "sizes is empty"),
    (BENCH + "--sizes tiny --models exp,rnn", "models is 'rnn'"),
    (BENCH + "--json nowhere/x.json", "there is no folder nowhere"),
    ("prepare texts.jsonl --out new --shard-tokens -1", "shard_tokens is -1"),
    ("prepare texts.jsonl --out texts.jsonl/new", "texts.jsonl/.new.partial: Not a directory"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "sentence"), COMMANDS, ids=[ascii(row[0]) for row in COMMANDS])
def test_flags_are_refused(place, monkeypatch, capsys, command, sentence):
    monkeypatch.chdir(place)
    monkeypatch.setattr(bench, "measure", None)  # nothing is measured before the refusal
    before = sorted(place.rglob("*"))
    assert main(command.split(" ")) == 2
    out, err = capsys.readouterr()
    assert err.startswith("tfla: ") and sentence in err and err.count("\n") == 1
    assert out == ""  # no token before it
    assert sorted(place.rglob("*")) == before


def test_cuda_where_there_is_none(place, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["eval", str(place / "run"), "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "tfla: device is 'cuda'; torch finds 0 CUDA devices here\n"


@pytest.mark.parametrize("temperature", ["1e-45", "1e-320"])
def test_generate_at_the_smallest_temperature(place, capsys, temperature):
    texts = []
    for flag in (temperature, "0"):
        assert main([*TEXT.replace("run", str(place / "run")).split(), "--temperature", flag]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


ERRORS = [
    (ValueError("tfla: x is 3"), "tfla: x is 3", 2),
    (RuntimeError("tfla: the loss is nan"), "tfla: the loss is nan", 2),
    (ImportError("tfla: needs y"), "tfla: needs y", 2),
    (PermissionError(errno.EACCES, "Permission denied", "f"), "tfla: f: Permission denied", 2),
    (OSError(errno.ENOSPC, "No space left on device"), "tfla: No space left on device", 2),
    (MemoryError(), "tfla: memory does not suffice: the system has no more", 2),
    (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "tfla: memory does not suffice: CUDA out of memory", 2),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "tfla: memory does not suffice: [enforce", 2),
    (KeyboardInterrupt(), "tfla: interrupted", 130),
    *[(error, None, None) for error in (ValueError("x"), RuntimeError("x"), KeyError("x"), ImportError("x"))],
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "code"), ERRORS, ids=[repr(row[0]) for row in ERRORS])
def test_which_errors_are_sentences(monkeypatch, capsys, error, message, code):
    def fail(_):
        raise error

    monkeypatch.setattr(prepare_command, "run", fail)
    command = ["prepare", "x", "--out", "y"]
    if message is None:  # an error in the program shows its place
        with pytest.raises(type(error)):
            main(command)
        return
    assert main(command) == code
    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1


def test_a_full_disk_is_named_and_an_interrupt_leaves_nothing(tmp_path, monkeypatch, capsys):
    write_texts(tmp_path / "a.jsonl")
    command = ["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "data")]
    for error, code, words in (
        (OSError(errno.ENOSPC, "No space left on device"), 2, "-00000.bin: No space left on device\n"),
        (KeyboardInterrupt(), 130, "tfla: interrupted\n"),
    ):

        def fail(_, error=error):
            raise error

        monkeypatch.setattr(os, "fsync", fail)
        assert main(command) == code
        assert capsys.readouterr().err.endswith(words)
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_closed_pipe_is_no_error(place, monkeypatch, capsys):
    """As `generate ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(TEXT.replace("run", str(place / "run")).split()) == 141
    assert capsys.readouterr().err == ""


def test_output_to_a_full_disk_is_said_once(place, monkeypatch, capsys):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(TEXT.replace("run", str(place / "run")).split()) == 2
    assert capsys.readouterr().err == "tfla: No space left on device\n"


def test_a_pipe_that_is_not_the_output(monkeypatch, capsys):
    def fail(_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(prepare_command, "run", fail)
    assert main(["prepare", "x", "--out", "y"]) == 2
    assert capsys.readouterr().err == "tfla: Broken pipe\n"
