"""Files of others run no code and lead nowhere else, whatever command reads them; values that cannot be are refused."""

import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from lm_inputs import small_model, write_texts
from tfla.lm.cli import main
from tfla.lm.training import checkpoint, storage
from tfla.lm.training.train import Run

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = (
    "--layers 1 --dim 32 --heads 2 --context 32 --batch 2 --warmup 1 --cooldown 1 --device cpu --peak-flops 1e9 "
    "--no-tensorboard --no-progress"
).split()
BEGIN = ["train", "--data", "data", "--out", "new", *SMALL, "--steps", "4"]
SAMPLE = ["the", "--max-tokens", "2", "--device", "cpu"]
COMMANDS = {
    "generate": ["generate", "run", *SAMPLE],
    "eval": ["eval", "run", "--device", "cpu"],
    "export": ["export", "run", "--layout", "xlstm", "--out", "out"],
    "resume": ["train", "--out", "run", "--device", "cpu", "--no-tensorboard", "--no-progress", "--steps", "6"],
    "begin": [*BEGIN, "--begin-from", "run"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset with a tokenizer, and a run of four steps on it."""
    folder = tmp_path_factory.mktemp("made")
    texts = write_texts(folder / "texts.jsonl")
    data = str(folder / "data")
    assert main(["prepare", str(texts), "--out", data, "--train-tokenizer", "300", "--validation", "0.2"]) == 0
    assert main(["train", "--data", data, "--out", str(folder / "run"), *SMALL, "--steps", "4"]) == 0
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch, capsys):
    """A copy of both to spoil, and the working folder."""
    for name in ("data", "run"):
        shutil.copytree(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    return tmp_path


def refused(command, capsys) -> str:
    """The one sentence that a command ends with."""
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tfla: ")
    return line


class Payload:
    def __reduce__(self):
        return os.mkdir, ("OWNED",)


def sign(path: Path) -> None:
    """Checksums as an attacker would write them."""
    meta = json.loads((path / "checkpoint.json").read_text())
    for name in meta["files"]:
        content = (path / name).read_bytes()
        meta["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (path / "checkpoint.json").write_text(json.dumps(meta))


def metadata_is_payload(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Payload()))


def metadata_holds_payload(path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data["payload"] = Payload()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def entry_is_payload(name: str, as_bytes: bool = False):
    """An entry of the shard, whose place the metadata says, is what torch.save makes of the payload."""

    def spoil(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        key = next(key for key in metadata.storage_data if key.fqn == name)
        shard = path / metadata.storage_data[key].relative_path
        torch.save(Payload(), path / "payload")
        added = (path / "payload").read_bytes()
        (path / "payload").unlink()
        place = metadata.storage_data[key]
        place.offset, place.length = shard.stat().st_size, len(added)
        shard.write_bytes(shard.read_bytes() + added)
        if as_bytes:
            metadata.state_dict_metadata[name] = storage.BytesStorageMetadata()
            metadata.storage_data[storage.MetadataIndex(name)] = metadata.storage_data.pop(key)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return spoil


ATTACKS = {
    "metadata": metadata_is_payload,
    "inside metadata": metadata_holds_payload,
    "value": entry_is_payload("optimizer.param_groups.0.lr"),
    "tensor": entry_is_payload("model.norm.weight"),
    "value in place of a tensor": entry_is_payload("model.norm.weight", as_bytes=True),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("command", COMMANDS)
def test_checkpoints_run_no_code(folder, capsys, command, attack):
    path = folder / "run" / "step-00000004"
    ATTACKS[attack](path)
    sign(path)
    if attack == "value" and command != "resume":  # who wants the weights alone does not read it
        assert main(COMMANDS[command]) == 0
    else:
        line = refused(COMMANDS[command], capsys)
        assert "step-00000004" in line and ("metadata" not in attack or ".mkdir; a checkpoint holds no such" in line)
    assert not (folder / "OWNED").exists()


def test_the_payload_is_one(folder):
    pickle.loads(pickle.dumps(Payload()))
    assert (folder / "OWNED").exists()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_states_and_safetensors_run_no_code(folder, capsys, legacy):
    torch.save({"format": Payload()}, "state.pt", _use_new_zipfile_serialization=not legacy)
    assert "state.pt is not a saved session" in refused(["generate", "run", *SAMPLE, "--state", "state.pt"], capsys)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    shutil.copy("state.pt", "model/model.safetensors")
    assert "model.safetensors is not safetensors" in refused(["import", "model", "--out", "imported"], capsys)
    shutil.copy("state.pt", "model/pytorch_model.bin")
    Path("model/model.safetensors").unlink()
    assert "holds no .safetensors file" in refused(["import", "model", "--out", "imported"], capsys)
    assert not (folder / "OWNED").exists() and not (folder / "imported").exists()


def change(file: Path, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


NAMES = ["../payload", "/etc/hostname", "a/b", "a\\b", "..", ".", "", "nul\0"]


@pytest.mark.parametrize("name", NAMES)
def test_names_lead_nowhere_else(folder, capsys, name):
    """Those of tokenizers in datasets and checkpoints, and of a checkpoint's files."""
    (folder / "payload").write_text("{}")
    before = sorted(folder.rglob("*"))
    saved = folder / "run" / "step-00000004" / "checkpoint.json"
    files = json.loads(saved.read_text())["files"]
    change(folder / "data" / "dataset.json", tokenizer=name)
    assert repr(name) in refused(BEGIN, capsys)
    change(saved, tokenizer=name)
    for command in ("generate", "export", "begin"):
        assert repr(name) in refused(COMMANDS[command], capsys)
    change(saved, tokenizer="tokenizer.json", files={**files, name: {"bytes": 2, "crc32": 0}})
    assert repr(name) in refused(COMMANDS["generate"], capsys)
    assert sorted(folder.rglob("*")) == before


def test_shards_lie_in_the_checkpoint(folder, capsys):
    path = folder / "run" / "step-00000004"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    shutil.copy(path / "__0_0.distcp", folder / "elsewhere")
    for place in metadata.storage_data.values():
        place.relative_path = "../../elsewhere"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(path)
    assert "names a file '../../elsewhere'" in refused(COMMANDS["generate"], capsys)


BAD_META = {
    "has no step": lambda meta: meta.pop("step"),
    "has no files": lambda meta: meta.pop("files"),
    "step of .* is 'x'; it must be a whole number": lambda meta: meta.update(step="x"),
    "model of .* is None; it must be a dictionary": lambda meta: meta.update(model=None),
    "tokens of .* is 0; it must be positive": lambda meta: meta.update(tokens=0),
    "checkpoint.json: dim is '32'; it must be a whole number": lambda meta: meta["model"].update(dim="32"),
    "checkpoint.json: dim is missing": lambda meta: meta["model"].pop("dim"),
    "checkpoint.json: dim is 1099511627776; it must be .* at most": lambda meta: meta["model"].update(dim=2**40),
    "does not fit into the memory": lambda meta: meta["model"].update(vocab=2**31, dim=2**15),
    "no size and checksum of .metadata": lambda meta: meta["files"].pop(".metadata"),
    "no size and checksum of __0_0": lambda meta: meta["files"].update({"__0_0.distcp": {}}),
    "names the tokenizer 'other.json', which is not among": lambda meta: meta.update(tokenizer="other.json"),
}


@pytest.mark.parametrize("sentence", BAD_META)
def test_bad_checkpoint_json_is_refused(folder, capsys, sentence):
    file = folder / "run" / "step-00000004" / "checkpoint.json"
    meta = json.loads(file.read_text())
    BAD_META[sentence](meta)
    file.write_text(json.dumps(meta))
    assert_match(sentence, refused(COMMANDS["generate"], capsys))


def assert_match(sentence: str, line: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        raise ValueError(line)


VALUES = {
    "--log-every 0": "log_every is 0; it must be positive",
    "--log-every -1": "log_every is -1; it must be positive",
    "--save-every 0": "save_every is 0; it must be positive",
    "--eval-every 0": "eval_every is 0; it must be positive",
    "--eval-rows -1": "eval_rows is -1; it must be positive",
    "--keep 0": "keep is 0; it must be positive",
    "--keep -1": "keep is -1; it must be positive",
    "--stop-after 0": "stop_after is 0; it must be positive",
    "--time-limit -1": "time_limit is -1.0; it must be positive",
    "--time-limit nan": "time_limit is nan; it must be finite",
    "--peak-flops 0": "peak is 0.0; it must be positive",
    "--device tpu": "device is 'tpu'; it must be 'cpu', 'cuda' or",
    "--device cuda:99": "device is 'cuda:99'; torch finds",
    "--lr nan": "lr is nan; it must be finite",
    "--lr -1": "lr is -1.0; it must be positive",
    "--lr 0": "lr is 0.0; it must be positive",
    "--min-lr 2": "min_lr is 2.0; it must be at least 0 and at most 1",
    "--betas 2 2": r"betas is \(2.0, 2.0\); it must each be at least 0 and below 1",
    "--betas 0.9 nan": r"betas is \(0.9, nan\); it must be finite",
    "--adam-eps -1": "adam_eps is -1.0; it must be at least 0",
    "--eps -1": "eps is -1.0; it must be at least 0",
    "--weight-decay nan": "weight_decay is nan; it must be finite",
    "--weight-decay -1": "weight_decay is -1.0; it must be at least 0",
    "--clip 0": "clip is 0.0; it must be positive",
    "--clip nan": "clip is nan; it must be finite",
    f"--seed {2**70}": f"seed is {2**70}; it must be at least 0 and at most",
    "--seed -3": "seed is -3; it must be at least 0 and at most",
    "--qk-factor nan": "qk_factor is nan; it must be finite",
    "--qk-factor 1e9": "qk_factor is 1000000000.0; it must be positive and at most 64",
    "--v-factor 0": "v_factor is 0.0; it must be positive and at most 64",
    "--dim 10000000": "dim is 10000000; it must be positive and at most",
    "--dim 0": "dim is 0; it must be positive",
    "--heads 3": "heads",
    "--batch 0": "batch is 0; it must be positive",
    "--context 0": "context is 0; it must be positive",
    "--micro-batch -1": "micro_batch is -1; it must be positive",
    "--warmup -1": "warmup is -1; it must be at least 0",
    "--gate-soft-cap -1": "gate_soft_cap is -1.0; it must be positive",
    "--logit-soft-cap nan": "logit_soft_cap is nan; it must be finite",
    "--chunk-size -1": "chunk_size is -1; it must be positive",
    "--forget-gate-bias nan 1": "forget_gate_bias is .*; it must be finite",
    "--context 100000": "not one row of context",
}


@pytest.mark.parametrize("flags", VALUES)
def test_values_that_cannot_be_are_refused(folder, capsys, flags):
    assert_match(VALUES[flags], refused([*BEGIN, *flags.split()], capsys))
    assert not (folder / "new").exists() or flags.startswith("--heads")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["generate", "eval", "begin"])
def test_cuda_without_a_device_is_refused(folder, capsys, command):
    assert "device is 'cuda'; torch finds 0 CUDA devices" in refused([*COMMANDS[command], "--device", "cuda"], capsys)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keep": 0}, "keep is 0; it must be positive"),
        ({"log_every": 1.5}, "log_every is 1.5; it must be a whole number"),
        ({"begin_from": "run"}, "begin_from is 'run'; it must be a pathlib.Path or None"),
    ],
    ids=str,
)
def test_runs_check_their_fields(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        Run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_save_keeps_at_least_one(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="^tfla: keep is -1; it must be positive"):
        checkpoint.save(tmp_path, 1, model, torch.optim.AdamW(model.parameters()), {}, checkpoint.World(), keep=-1)
    assert list(tmp_path.iterdir()) == []


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="^tfla: a model of 2 layers of width 32768 .* does not fit into the memory"):
        checkpoint.make_model(small_model(vocab=2**31, dim=2**15), torch.float32)
