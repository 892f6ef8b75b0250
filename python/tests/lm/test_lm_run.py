"""The life of a run: one trainer, signals, failed saves, moved folders, more steps, the log."""

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm_inputs import make_data, small_model, small_recipe
from lm_worker import options
from tfla.lm.cli import main
from tfla.lm.training import checkpoint, metrics
from tfla.lm.training import train as training
from tfla.lm.training.lock import locked
from tfla.lm.training.metrics import Log, Progress, Utilisation, peak_flops, read_log
from tfla.lm.training.optimizer import learning_rate, make_optimizer
from tfla.lm.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET = ["--device", "cpu", "--no-tensorboard", "--no-progress", "--peak-flops", "1e9"]
HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    train(small_model(), small_recipe(), data, options(run))
    return run


def rates(run: Path) -> dict[int, float]:
    return {line["step"]: line["lr"] for line in read_log(run / "log.jsonl") if "lr" in line}


def test_one_trainer_at_a_time(data, tmp_path, capsys):
    run = tmp_path / "run"
    with (
        locked(run),
        pytest.raises(BlockingIOError, match=rf"^tfla: .*run is being trained by process {os.getpid()} on"),
    ):
        train(small_model(), small_recipe(), data, options(run))
    assert not (run / "log.jsonl").exists()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, run / ".lock"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert main(["train", "--data", str(data), "--out", str(run), *QUIET]) == 2
        assert "is being trained by" in capsys.readouterr().err
    finally:
        holder.kill()
        holder.wait()
    # The file is still there, its holder is not.
    assert train(small_model(), small_recipe(), data, options(run, stop_after=1))["step"] == 1


def test_a_run_that_is_refused_leaves_nothing(data, tmp_path, capsys):
    """Its model cannot be built, which is known when the lock is held: 5 heads do not divide 128."""
    command = ["train", "--data", str(data), "--heads", "5", *QUIET, "--out"]
    assert main([*command, str(tmp_path / "runs" / "new")]) == 2
    assert "qk_factor makes 64 of dim 128" in capsys.readouterr().err and not list(tmp_path.iterdir())
    # What was there before stays, and so does what a run has written.
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    assert main([*command, str(tmp_path / "notes")]) == 2
    assert os.listdir(tmp_path / "notes") == ["mine.txt"]
    with pytest.raises(KeyError), locked(tmp_path / "run"):
        (tmp_path / "run" / "log.jsonl").touch()
        raise KeyError
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "log.jsonl"]
    with pytest.raises(KeyError), locked(tmp_path / "run"):
        raise KeyError
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "log.jsonl"]


def test_a_lock_that_is_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """By a run that failed, between the opening of the file and the lock on it."""
    run, flock, seen = tmp_path / "run", fcntl.flock, []

    def late(handle, how):
        seen.append(handle)
        if len(seen) == 1:
            shutil.rmtree(run)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(run):
        assert len(seen) == 2 and str(os.getpid()) in (run / ".lock").read_text()
        with pytest.raises(BlockingIOError), locked(run):
            pass


def test_hangup_that_is_ignored_stays_ignored(data, tmp_path, monkeypatch):
    original = training.learning_rate

    def rate(recipe, step):
        os.kill(os.getpid(), signal.SIGHUP)
        return original(recipe, step)

    monkeypatch.setattr(training, "learning_rate", rate)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(small_model(), small_recipe(), data, options(tmp_path / "run"))["finished"]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_progress_outlives_its_terminal(monkeypatch):
    class Gone:
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    progress = Progress(3, enabled=True)
    progress.show(1, "loss 1")
    assert not progress.enabled
    progress.close()


def test_finished_run_is_given_more_steps(data, finished, tmp_path, capsys):
    run, longer = shutil.copytree(finished, tmp_path / "run"), small_recipe(steps=9)
    command = ["train", "--out", str(run), "--steps", "9", *QUIET]
    assert main(command) == 0
    streams = capsys.readouterr()
    assert "step 9 of 9: finished" in streams.out
    assert "was to have 6 steps and now has 9: from step 7 on the learning rate is that of a run of 9" in streams.err
    assert {"step": 7, "steps": 9, "steps_before": 6} in read_log(run / "log.jsonl")
    expected = {step + 1: learning_rate(small_recipe() if step < 6 else longer, step) for step in range(9)}
    assert rates(run) == pytest.approx(expected)
    assert main(command) == 0 and "was to have" not in capsys.readouterr().err
    assert main(["train", "--out", str(run), "--steps", "8", *QUIET]) == 2
    assert "tfla: steps is 8; " in (line := capsys.readouterr().err) and "has done 9" in line


def test_run_can_be_shortened_to_what_is_not_done_yet(data, tmp_path):
    train(small_model(), small_recipe(steps=9), data, options(tmp_path / "run", stop_after=4))
    assert train(small_model(), small_recipe(), data, options(tmp_path / "run"))["finished"]
    expected = {step + 1: learning_rate(small_recipe(steps=9 if step < 4 else 6), step) for step in range(6)}
    assert rates(tmp_path / "run") == pytest.approx(expected)


def test_folders_may_move(data, tmp_path, monkeypatch, capsys):
    """The working folder, the run and, when it is said where to, the dataset."""
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    shutil.copytree(data, tmp_path / "here" / "data")
    monkeypatch.chdir(tmp_path / "here")
    fields = "--layers 1 --dim 32 --heads 2 --context 32 --batch 2 --warmup 1 --cooldown 1 --steps 6".split()
    assert main(["train", "--data", "data", "--out", "run", *fields, *QUIET, "--stop-after", "2"]) == 0
    Path("run").rename("../elsewhere/moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--out", "moved", *QUIET, "--stop-after", "4"]) == 0
    assert main(["eval", "moved", "--device", "cpu"]) == 0
    Path("../here/data").rename("../data-now")
    capsys.readouterr()
    for command in (["eval", "moved", "--device", "cpu"], ["train", "--out", "moved", *QUIET]):
        assert main(command) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"tfla: {tmp_path}/here/data, the dataset of moved") and "say with --data" in line
        assert main([*command, "--data", "../data-now"]) == 0
        capsys.readouterr()
    assert main(["eval", "moved", "--device", "cpu"]) == 0  # the last checkpoint knows the new place


def test_validation_that_is_not_there_is_noticed_at_once(tmp_path, capsys):
    data = make_data(tmp_path, validation=0.0)
    command = ["train", "--data", str(data), "--out", str(tmp_path / "run"), *QUIET, "--eval-every", "4"]
    assert main(command) == 2
    assert "tfla: eval_every is 4; split 'validation' of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_checkpoint_is_saved_before_evaluation(data, tmp_path, monkeypatch):
    def fail(*arguments, **named):
        raise MemoryError

    monkeypatch.setattr(training, "evaluate", fail)
    run = replace(options(tmp_path / "run", save_every=2), eval_every=2)
    with pytest.raises(MemoryError):
        train(small_model(), small_recipe(), data, run)
    assert checkpoint.steps(tmp_path / "run") == [2]


def test_full_disk_is_one_sentence(data, tmp_path, capsys):
    """A file may not grow beyond 40,000 bytes: the shard of a checkpoint would."""
    run, command = tmp_path / "run", ["--steps", "6", "--save-every", "2", "--warmup", "1", "--cooldown", "1", *QUIET]
    fields = "--layers 1 --dim 32 --heads 2 --context 32 --batch 2".split()
    command = ["train", "--data", str(data), "--out", str(run), *fields, *command]
    assert main([*command, "--stop-after", "2"]) == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        assert main(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"tfla: {run}/step-00000004 could not be saved: File too large; what was saved before is kept"
    assert sorted(path.name for path in run.iterdir()) == [".lock", "log.jsonl", "step-00000002"]
    assert main(command) == 0 and checkpoint.steps(run) == [4, 6]


def test_log_that_cannot_be_written_is_one_sentence(tmp_path):
    log = Log(tmp_path, 0, tensorboard=False)
    log._file.close()
    log._file = Path("/dev/full").open("w")
    log.write({"step": 1})
    with pytest.raises(OSError, match="^tfla: .*log.jsonl cannot be written: No space left on device; "):
        log.flush()


def test_nan_ends_the_command_with_a_sentence(data, tmp_path, capsys):
    run = tmp_path / "run"
    fields = "--layers 1 --dim 32 --heads 2 --context 32 --batch 2 --steps 6 --warmup 0 --cooldown 1".split()
    command = ["train", "--data", str(data), "--out", str(run), *fields, *QUIET, "--lr", "1e30"]
    assert main([*command, "--stop-after", "1"]) == 0
    before = {path: path.read_bytes() for path in (run / "step-00000001").iterdir()}
    capsys.readouterr()
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is nan at step" in line and line.endswith("checkpoints before it are kept")
    assert {path: path.read_bytes() for path in (run / "step-00000001").iterdir()} == before
    assert checkpoint.steps(run) == [1]


def test_checkpoint_is_on_disk_before_it_has_its_name(data, tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, Path.rename

    def record_sync(handle):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        sync(handle)

    def record_rename(path, target):
        events.append(("rename", path.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    train(small_model(), small_recipe(), data, options(tmp_path / "run"))
    partial = ".step-00000006.partial"
    place = events.index(("rename", partial))
    files = {path.name for path in (tmp_path / "run" / "step-00000006").iterdir()}
    assert {name for kind, name in events[:place] if kind == "sync"} >= {*files, partial}
    assert events[place - 1] == ("sync", partial) and ("sync", "run") in events[place:]


def test_old_checkpoints_lose_their_name_before_their_files(data, tmp_path, monkeypatch):
    run, seen = tmp_path / "run", []
    original = shutil.rmtree

    def remove(path, **named):
        seen.append(Path(path).name)
        if Path(path).exists() and Path(path).name == ".step-00000002.removed":
            raise KeyboardInterrupt  # killed meanwhile
        original(path, **named)

    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(KeyboardInterrupt):
        train(small_model(), small_recipe(), data, options(run, save_every=2, keep=1))
    monkeypatch.setattr(shutil, "rmtree", original)
    assert not [name for name in seen if not name.startswith(".")]
    assert checkpoint.steps(run) == [4] and (run / ".step-00000002.removed").exists()
    train(small_model(), small_recipe(), data, options(run, keep=1))
    assert checkpoint.steps(run) == [6] and not (run / ".step-00000002.removed").exists()


def test_checkpoint_restores_the_random_state(data, finished):
    config, recipe, folder = training.resume_options(finished)
    model = checkpoint.make_model(config, torch.float32)
    about = checkpoint.describe(config, recipe, training.Dataset(folder, "train", recipe.context))
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        checkpoint.load(checkpoint.directory(finished, 6), model, make_optimizer(model, recipe), about)
        states.append(torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(*states) and not torch.equal(states[0], torch.get_rng_state())


def test_bad_lines_of_a_log_cost_themselves_alone(tmp_path):
    good = [{"step": 1}, {"step": 2}, {"step": 3}]
    bad = ['{"st', "[1]", "7", '{"loss": 1}', '{"step": "1"}', "\udcff\udcfe", ""]
    lines = [json.dumps(good[0]), *bad, json.dumps(good[1]), *bad, json.dumps(good[2])]
    (tmp_path / "log.jsonl").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    assert read_log(tmp_path / "log.jsonl") == good
    Log(tmp_path, 2, tensorboard=False).close()
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_log_is_replaced_as_a_whole(tmp_path, monkeypatch):
    content = "".join(f'{{"step": {step}}}\n' for step in range(1, 5))
    (tmp_path / "log.jsonl").write_text(content)

    def die(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        Log(tmp_path, 2, tensorboard=False)
    assert (tmp_path / "log.jsonl").read_text() == content
    monkeypatch.undo()
    with (tmp_path / "log.jsonl").open() as old:  # what has the name changes, not what is in the file
        Log(tmp_path, 2, tensorboard=False).close()
        assert old.read() == content and len(read_log(tmp_path / "log.jsonl")) == 2


def test_utilisation_is_at_most_the_peak(data, tmp_path):
    of = Utilisation(2e9).of
    assert [of(1e9), of(4e9), of(1e9)] == [0.5, 1.0, 0.25] and Utilisation(None).of(1e9) is None
    train(small_model(), small_recipe(), data, replace(options(tmp_path / "run"), log_every=1, peak=1.0))
    found = [line["mfu"] for line in read_log(tmp_path / "run" / "log.jsonl") if "mfu" in line]
    assert len(found) == 6 and max(found) == 1.0 and min(found) > 0
    measured = peak_flops(torch.device("cpu"))
    assert measured is not None and measured > 1e8
