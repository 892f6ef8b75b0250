"""Training: resumed bit for bit, the same on several processes, checkpoints that survive, refusals by name."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm_inputs import make_data, small_model, small_recipe, write_texts
from lm_worker import RUNS, options
from ranks import run_ranks
from tfla.lm.data.prepare import Source, prepare
from tfla.lm.training import checkpoint, storage
from tfla.lm.training import train as training
from tfla.lm.training.metrics import Log, read_log
from tfla.lm.training.train import Run, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that was never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(small_model(), small_recipe(), data, options(run, save_every=2, keep=10))
    return run


def losses(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["gradient_norm"]) for line in read_log(run / "log.jsonl") if "loss" in line]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_model(path)[0].state_dict()


def assert_same_run(run: Path, whole: Path) -> None:
    """Bit for bit: every loss, every gradient norm, the weights, and what is logged of the validation."""
    assert losses(run) == losses(whole)
    timing = ("tokens_per_second", "mfu")
    assert [{k: v for k, v in line.items() if k not in timing} for line in read_log(run / "log.jsonl")] == [
        {k: v for k, v in line.items() if k not in timing} for line in read_log(whole / "log.jsonl")
    ]
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("stops", [(1,), (3,), (2, 5)])
def test_resumed_run_is_the_same_bit_for_bit(data, whole, tmp_path, stops):
    for stop in (*stops, None):
        torch.manual_seed(99 if stop is None else stop)  # a new process has another state
        summary = train(small_model(), small_recipe(), data, options(tmp_path / "run", stop_after=stop, save_every=100))
        assert summary["finished"] == (stop is None)
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("changes", [{"train_input_gate": False}, {"kind": "transformer"}], ids=str)
def test_other_models_are_resumed_bit_for_bit(data, tmp_path, changes):
    for stop in (2, None):
        train(small_model(**changes), small_recipe(), data, options(tmp_path / "resumed", stop_after=stop))
    train(small_model(**changes), small_recipe(), data, options(tmp_path / "run"))
    assert_same_run(tmp_path / "resumed", tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_and_the_run_goes_on(data, whole, tmp_path, monkeypatch, number):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    outside = signal.signal(number, usual)  # under nohup one of them is ignored
    try:
        _signal_saves_and_the_run_goes_on(data, whole, tmp_path, monkeypatch, number)
    finally:
        signal.signal(number, outside)


def _signal_saves_and_the_run_goes_on(data, whole, tmp_path, monkeypatch, number):
    original, sent = training.learning_rate, []

    def rate(recipe, step):
        if step == 2 and not sent:  # a second signal would end the process
            sent.append(os.kill(os.getpid(), number))
        return original(recipe, step)

    run, before = tmp_path / "run", signal.getsignal(number)
    monkeypatch.setattr(training, "learning_rate", rate)
    summary = train(small_model(), small_recipe(), data, options(run))
    assert (summary["step"], summary["finished"]) == (3, False)
    assert signal.getsignal(number) == before
    monkeypatch.setattr(training, "learning_rate", original)
    assert train(small_model(), small_recipe(), data, options(run))["begun_at"] == 3
    assert_same_run(run, whole)


def test_interrupted_save_leaves_the_one_before(data, whole, tmp_path, monkeypatch):
    original, run = storage.save, tmp_path / "run"

    def save(state, path):
        original(state, path)
        if "00000004" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(storage, "save", save)
    with pytest.raises(KeyboardInterrupt):
        train(small_model(), small_recipe(), data, options(run, save_every=2, keep=1))
    assert (run / ".step-00000004.partial").exists()
    assert checkpoint.latest(run) == checkpoint.directory(run, 2)
    checkpoint.verify(checkpoint.directory(run, 2))
    monkeypatch.setattr(storage, "save", original)
    assert train(small_model(), small_recipe(), data, options(run, save_every=2, keep=1))["begun_at"] == 2
    assert_same_run(run, whole)
    assert checkpoint.steps(run) == [6] and not (run / ".step-00000004.partial").exists()


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = [
    ("__0_0.distcp", cut, r"__0_0.distcp has \d+ bytes of \d+; the checkpoint was cut off"),
    ("__0_0.distcp", flip, "__0_0.distcp does not have its checksum"),
    ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
    (".metadata", cut, r".metadata has \d+ bytes of"),
    ("checkpoint.json", cut, "checkpoint.json is cut off or not JSON"),
    ("checkpoint.json", Path.unlink, "is not a checkpoint of tfla.lm: it has no checkpoint.json"),
    ("checkpoint.json", lambda path: path.write_text('{"format": "else"}'), "is not 'tfla.lm checkpoint' version 1"),
]


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGES, ids=[row[2] for row in DAMAGES])
def test_damaged_checkpoint_is_passed_over(data, whole, tmp_path, capsys, name, damage, sentence):
    """Training goes on from the one before and saves the same step again; everything else refuses it by name."""
    run = shutil.copytree(whole, tmp_path / "run")
    damage(run / "step-00000006" / name)
    before = sorted(path.name for path in (run / "step-00000006").iterdir())
    with pytest.raises(ValueError, match=f"^tfla: .*{sentence}"):
        checkpoint.load_model(run)
    checkpoint.load_model(run / "step-00000004")  # the one before is whole
    config, recipe, folder = training.resume_options(run)
    assert train(config, recipe, folder, options(run, keep=10))["begun_at"] == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"tfla: .*{sentence}.*; going on from the one before, .* kept as step-00000006.damaged", line)
    assert sorted(path.name for path in (run / "step-00000006.damaged").iterdir()) == before
    assert checkpoint.steps(run) == [2, 4, 6]
    assert_same_run(run, whole)


@pytest.mark.parametrize("damage", [("__0_0.distcp", flip), ("checkpoint.json", Path.unlink)], ids=["shard", "meta"])
def test_run_without_a_whole_checkpoint_is_left_alone(data, whole, tmp_path, damage):
    run, (name, how) = shutil.copytree(whole, tmp_path / "run"), damage
    for path in run.glob("step-*"):
        how(path / name)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for call in (
        lambda: train(small_model(), small_recipe(), data, options(run)),
        lambda: train(*training.resume_options(run), options(run)),
    ):
        with pytest.raises(ValueError, match="^tfla: .*run has no whole checkpoint to go on from: .*step-00000006"):
            call()
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == {path: content for path, content in before.items() if path.name != ".lock"}


FOREIGN = [
    ({"dim": 48}, {}, "was trained with dim 32, this run has 48"),
    ({"gate": "sigmoid"}, {}, "was trained with gate 'exp', this run has 'sigmoid'"),
    ({}, {"lr": 1e-3}, "was trained with lr 0.005, this run has 0.001"),
    ({}, {"batch": 8}, "was trained with batch 4, this run has 8"),
]


@pytest.mark.parametrize(("model", "recipe", "sentence"), FOREIGN, ids=[row[2] for row in FOREIGN])
def test_foreign_checkpoints_are_refused(data, whole, model, recipe, sentence):
    with pytest.raises(ValueError, match=sentence):
        train(small_model(**model), small_recipe(**recipe), data, options(whole))


def test_other_data_is_refused(whole, tmp_path):
    source = Source([write_texts(tmp_path / "texts.jsonl", documents=50, seed=1)])
    prepare(source, tmp_path / "other", validation=0.2)
    with pytest.raises(ValueError, match="was trained on another dataset than .*other"):
        train(small_model(), small_recipe(), tmp_path / "other", options(whole))


@pytest.mark.parametrize(
    ("model", "recipe", "sentence"),
    [
        ({}, {"micro_batch": 3}, "micro_batch is 3; it must divide the 4 sequences"),
        ({"vocab": 128}, {}, "vocab is 128; .* has 257 tokens"),
        ({}, {"context": 100_000}, "not one row of context"),
        ({}, {"context_parallel": 2}, "context_parallel is 2; it must divide the 1 processes"),
    ],
)
def test_runs_that_cannot_be_are_refused(data, tmp_path, model, recipe, sentence):
    with pytest.raises(ValueError, match=sentence):
        train(small_model(**model), small_recipe(**recipe), data, options(tmp_path / "run"))


@pytest.mark.parametrize("recipe", [{"micro_batch": 1}, {"micro_batch": 2, "checkpoint_activations": True}], ids=str)
def test_accumulation_changes_rounding_only(data, whole, tmp_path, recipe):
    train(small_model(), small_recipe(**recipe), data, options(tmp_path / "run"))
    for (loss, norm), (expected, expected_norm) in zip(losses(tmp_path / "run"), losses(whole), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5) and norm == pytest.approx(expected_norm, rel=1e-4)


def test_log_and_tensorboard(data, whole, tmp_path):
    run = tmp_path / "run"
    summary = train(small_model(), small_recipe(), data, Run(run, device="cpu", eval_every=3, progress=False))
    lines = read_log(run / "log.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["lr"] for line in steps] == pytest.approx([0, 0.0025, 0.005, 0.00275, 0.0005, 0.00025])
    assert all(-15 < line["input_gate_max"] < 15 and line["gradient_norm"] > 0 for line in steps)
    assert all(line["mfu"] > 0 and line["tokens_per_second"] > 0 for line in steps)
    assert steps[-1]["tokens"] == 6 * 4 * 48
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6]
    assert summary["validation_loss"] == lines[-1]["validation_loss"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([line["loss"] for line in steps])


def test_log_of_a_crash_is_cut_at_the_checkpoint(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    Log(tmp_path, 2, tensorboard=False).close()
    assert read_log(tmp_path / "log.jsonl") == [{"step": 1}, {"step": 2}]


def test_nan_is_reported_and_the_checkpoint_kept(data, tmp_path):
    run = tmp_path / "run"
    train(small_model(), small_recipe(lr=1e30, warmup=0), data, options(run, stop_after=1, save_every=1))
    with pytest.raises(RuntimeError, match="is nan at step .; checkpoints before it are kept"):
        train(small_model(), small_recipe(lr=1e30, warmup=0), data, options(run))
    assert checkpoint.steps(run) == [1]


def test_weights_of_a_checkpoint_begin_another_run(data, whole, tmp_path):
    recipe = small_recipe(lr=1e-9)
    train(small_model(), recipe, data, options(tmp_path / "run", begin_from=whole))
    before, after = weights(whole), weights(tmp_path / "run")
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    with pytest.raises(ValueError, match="has dim 32, this run has 48"):
        train(small_model(dim=48), recipe, data, options(tmp_path / "other", begin_from=whole))


@pytest.fixture(scope="module")
def two_processes(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    run_ranks("lm_worker.py", data, out, ranks=2, store=out / "store")
    return out


@pytest.fixture(scope="module")
def one_process(data, whole, tmp_path_factory):
    """The log of one process that trains a model, made once for each."""
    logs = {"{}": read_log(whole / "log.jsonl")}

    def log(model):
        if str(model) not in logs:
            run = tmp_path_factory.mktemp("alone") / "run"
            train(small_model(**model), small_recipe(), data, options(run))
            logs[str(model)] = read_log(run / "log.jsonl")
        return logs[str(model)]

    return log


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(two_processes, one_process, name):
    """Same losses, gradient norms, gate maxima and validation as one process with the whole batch, up to rounding."""
    lines = json.loads((two_processes / "logs.json").read_text())[name]
    expected = one_process(RUNS[name][1])
    assert len(lines) == len(expected) == 7
    for line, other in zip(lines, expected, strict=True):
        for key in ("loss", "gradient_norm", "input_gate_max", "validation_loss", "validation_bits_per_byte"):
            if other.get(key) is not None:
                assert line[key] == pytest.approx(other[key], rel=1e-4), (line["step"], key)


def test_two_processes_pass_over_the_same_checkpoint(two_processes, whole):
    """The last one is damaged: both go on from the one before."""
    assert json.loads((two_processes / "begun.json").read_text()) == 2
    assert checkpoint.steps(two_processes / "damaged") == [2, 6]
    for (loss, _), (expected, _) in zip(losses(two_processes / "damaged"), losses(whole), strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)


def test_torchrun(data, whole, tmp_path):
    """The command line as torchrun starts it, which reads the options before we do."""
    fields = "--layers 2 --dim 32 --heads 2 --input-gate-bias -1 --lr 5e-3 --batch 4 --steps 6 --context 48 --warmup 2"
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m tfla.lm train --cooldown 2 --device cpu"
    command = [sys.executable, *launch.split(), *fields.split(), "--no-progress", "--no-tensorboard"]
    command += ["--parallel", "fsdp", "--data", data, "--out", tmp_path / "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 6 of 6: finished") == 1
    for (loss, _), (expected, _) in zip(losses(tmp_path / "run"), losses(whole), strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)


def test_run_of_two_processes_is_resumed_by_one(two_processes, data, whole, tmp_path):
    run = shutil.copytree(two_processes / "stopped", tmp_path / "run")
    assert train(small_model(), small_recipe(), data, options(run))["begun_at"] == 3
    for (loss, _), (expected, _) in zip(losses(run), losses(whole), strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)
