"""The trainer against the recipe written out (plain_training.py): every loss, gradient norm, rate and weight."""

import os
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import plain_training
import recipe_worker
from lm_inputs import make_data, small_model, small_recipe, write_texts
from ranks import run_ranks
from recipe_worker import RUNS, report
from tfla.lm import LanguageModel, Recipe, recipe
from tfla.lm.data import Dataset, Order
from tfla.lm.data.prepare import Source, prepare
from tfla.lm.training import checkpoint
from tfla.lm.training.metrics import read_log
from tfla.lm.training.optimizer import learning_rate
from tfla.lm.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """So few rows that a run takes each more than twice, and that epochs end inside a step."""
    directory = tmp_path_factory.mktemp("recipe")
    prepare(Source([write_texts(directory / "texts.jsonl", documents=4, seed=1)]), directory / "data", validation=0)
    _, training = recipe_worker.configuration("plain")
    rows = Dataset(directory / "data", "train", training.context).whole_rows
    assert training.batch < rows < training.steps * training.batch / 2 and rows % training.batch
    return directory / "data"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a run, made when it is asked for; those of two processes are made together."""
    out = tmp_path_factory.mktemp("runs")

    def folder(name):
        if not (out / name).exists():
            if RUNS[name][0] == 1:
                recipe_worker.run(name, data, out)
            else:
                run_ranks("recipe_worker.py", data, out, ranks=2, store=out / "store")
        return out / name

    return folder


@pytest.fixture(scope="module")
def expected(data):
    """The steps of plain training, made once for all runs that differ in how they compute and not in what."""
    made = {}

    def steps(name):
        _, fields, model = RUNS[name]
        key = str((fields.get("seed"), model))
        if key not in made:
            config, training = recipe_worker.configuration(name)
            made[key] = list(plain_training.train(config, training, Dataset(data, "train", training.context)))
        return made[key]

    return steps


@pytest.mark.parametrize("name", RUNS)
def test_trainer_follows_the_recipe(trained, expected, name):
    """The trainer computes in float32. An update is of the size of the rate, 0.02: weights agree to 2.5e-4 of one."""
    _, training = recipe_worker.configuration(name)
    run, steps = trained(name), expected(name)
    lines = read_log(run / "log.jsonl")
    for number, (line, step) in enumerate(zip(lines, steps, strict=True), 1):
        assert line["step"] == number and line["tokens"] == number * training.batch * training.context
        assert line["loss"] == pytest.approx(step.loss, rel=1e-6), number
        # From the second step on the weights differ by that much, and their gradient with them.
        assert line["gradient_norm"] == pytest.approx(step.norm, rel=1e-5 if number == 1 else 5e-5), number
        assert line["lr"] == pytest.approx(step.rate, rel=1e-12), number
    saved = checkpoint.steps(run)
    assert saved == ([1, 2, 3, 4, 5, 6] if name == "plain" else [3, 6])
    for number in saved:
        weights = checkpoint.load_model(checkpoint.directory(run, number))[0].state_dict()
        assert weights.keys() == steps[number - 1].weights.keys()
        for key, weight in steps[number - 1].weights.items():
            torch.testing.assert_close(weights[key].double(), weight, rtol=0, atol=5e-6, msg=f"{key}, step {number}")


def test_some_steps_are_clipped(expected):
    """So that the comparison sees where."""
    _, training = recipe_worker.configuration("plain")
    norms = [step.norm for step in expected("plain")]
    assert min(norms[1:]) < 0.8 * training.clip and max(norms[1:]) > 2 * training.clip


SCHEDULES = [
    recipe("160m"),
    recipe("1.4b"),
    small_recipe(steps=40, warmup=7, cooldown=11, min_lr=0.3),
    small_recipe(steps=9, warmup=0, cooldown=0),
    small_recipe(steps=9, warmup=4, cooldown=5),
    small_recipe(steps=9, warmup=0, cooldown=9),
]


@pytest.mark.parametrize("training", SCHEDULES, ids=lambda r: f"{r.warmup}, {r.steps}, {r.cooldown}")
def test_rate(training):
    """At every step of short runs, at some hundred of long ones and around each change."""
    edges = (0, training.warmup, training.steps - training.cooldown, training.steps)
    near = {edge + offset for edge in edges for offset in (-1, 0, 1)}
    for step in sorted({*range(0, training.steps, max(training.steps // 300, 1)), *near}):
        if 0 <= step < training.steps:
            assert learning_rate(training, step) == pytest.approx(plain_training.rate(training, step), rel=1e-9), step


def test_recipe_is_the_papers():
    """What docs/lm.md says of the defaults."""
    training = Recipe(lr=1.0, batch=1, steps=5000)
    assert (training.betas, training.adam_eps, training.weight_decay) == ((0.9, 0.95), 1e-8, 0.1)
    assert (training.clip, training.warmup, training.cooldown, training.min_lr) == (0.5, 750, 1000, 0.1)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_epochs_are_permutations_that_differ(seed):
    rows, epochs = 30, 6

    def orders(seed):
        order = Order(rows, seed)
        numbers = [order.row(number) for number in range(rows * epochs)]
        return [numbers[begin : begin + rows] for begin in range(0, len(numbers), rows)]

    found = orders(seed)
    assert all(sorted(epoch) == list(range(rows)) for epoch in found)
    others = [epoch for other in (seed + 1, seed + 2, seed + 100) for epoch in orders(other)]
    everything = [tuple(epoch) for epoch in found + others]
    assert len(set(everything)) == len(everything)
    assert list(range(rows)) not in found


def test_rows_of_a_run_are_those_of_the_order(data, tmp_path, monkeypatch):
    """Every whole row, epoch after epoch, the batches laid end to end."""
    taken, original = [], Dataset.batch

    def batch(self, rows):
        taken.extend(rows)
        return original(self, rows)

    monkeypatch.setattr(Dataset, "batch", batch)
    recipe_worker.run("micro-batches", data, tmp_path)
    _, training = recipe_worker.configuration("micro-batches")
    rows = Dataset(data, "train", training.context).whole_rows
    order = Order(rows, training.seed)
    assert taken == [order.row(number) for number in range(training.steps * training.batch)]
    assert sorted(taken[:rows]) == sorted(taken[rows : 2 * rows]) == list(range(rows))


def test_random_state_goes_on(data, tmp_path):
    """A layer that draws, such as dropout, draws after a stop what it would have drawn without one."""

    def draws(run, *stops):
        drawn = []

        def draw(module, _):
            if isinstance(module, LanguageModel):
                drawn.append(torch.rand(()).item())

        hook = register_module_forward_pre_hook(draw)
        for stop in stops:
            torch.manual_seed(1000 + len(drawn))  # a new process has another state
            train(small_model(), small_recipe(), data, report(run, stop_after=stop))
        hook.remove()
        return drawn, torch.get_rng_state()

    drawn, state = draws(tmp_path / "whole", None)
    again, state_again = draws(tmp_path / "resumed", 2, 5, None)
    assert len(set(drawn)) == 6 and again == drawn
    assert torch.equal(state_again, state)


def test_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Every file with all of its bytes, then the folder, then the name, then the folder that holds the name."""
    data = make_data(tmp_path, train_tokenizer=300)  # a dataset with a tokenizer to save
    synced, renamed = [], []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(handle):
        fsync(handle)
        path = Path(f"/proc/self/fd/{handle}").resolve()
        synced.append((path, path.read_bytes() if path.is_file() else sorted(os.listdir(path))))

    def recording_rename(source, target, **rest):
        rename(source, target, **rest)
        if checkpoint.NAME.fullmatch(Path(target).name):
            renamed.append((Path(source).resolve(), Path(target).resolve(), len(synced)))

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    run = tmp_path / "run"
    train(small_model(), small_recipe(), data, report(run, save_every=3))
    assert [target.name for _, target, _ in renamed] == ["step-00000003", "step-00000006"]
    for partial, target, moment in renamed:
        before, after = synced[:moment], synced[moment:]
        assert (target / "tokenizer.json").exists() and len(list(target.iterdir())) == 4
        for file in target.iterdir():
            assert (partial / file.name, file.read_bytes()) in before, file.name
        assert (partial, sorted(os.listdir(target))) in before
        assert run.resolve() in [path for path, _ in after]
