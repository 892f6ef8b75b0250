"""benchmarks/lm/experiments: runs in pieces, results that merge, what is measured, recall, pages of made-up results."""

import dataclasses
import json
import math
import random
import re
import sys
import time

import pytest
import torch

from lm_inputs import EOD, ROOT, WORDS, small_model
from tfla.lm import LanguageModel, preset
from tfla.lm.data import Dataset
from tfla.lm.data.prepare import Source, prepare

sys.path.append(str(ROOT))

from benchmarks.lm.experiments import (  # noqa: E402
    common,
    curves,
    judgement,
    measures,
    page,
    plots,
    recall,
    recall_page,
    results,
    runner,
    tables,
    training,
)  # fmt: skip
from benchmarks.lm.experiments.__main__ import main  # noqa: E402
from benchmarks.lm.experiments.results import Results  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ABOUT = {"device": "made up", "date": "2026-01-02", "python": "3.12.3", "packages": {"tfla": "0.1.0"}}


@pytest.fixture(autouse=True)
def known_peak(monkeypatch):
    """So that no run measures the CPU's, which takes longer than the run."""
    monkeypatch.setattr(training.training, "peak_flops", lambda device: 1e12)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of 700 to 2,000 bytes, so that some are longer than eight contexts of 64."""
    folder = tmp_path_factory.mktemp("experiments")
    generator = random.Random(0)
    with (folder / "texts.jsonl").open("w") as file:
        for _ in range(60):
            text = " ".join(generator.choices(WORDS, k=generator.randint(150, 400)))
            file.write(json.dumps({"text": text}) + "\n")
    prepare(Source([folder / "texts.jsonl"]), folder / "data", validation=0.3)
    return folder / "data"


# --- runs


def test_a_run_in_pieces_is_the_run_in_one(data, tmp_path):
    run = tables.runs("quick")[0]
    place = runner.Place(data, tmp_path / "scratch", "cpu")
    whole, pieces = Results(tmp_path / "whole"), Results(tmp_path / "pieces")
    assert runner.work([run], whole, place, 1e6) == []
    calls = 0
    while runner.work([run], pieces, place, 1e-3):  # ends after its first step
        calls += 1
        assert not (tmp_path / "pieces").exists() and list((tmp_path / "scratch").rglob("checkpoint.json"))
    first, second = whole.read(run), pieces.read(run)
    assert calls == run.steps - 1 and first["seconds"] > 0 and second["seconds"] is None
    for key in ("curve", "validation_loss", "positions", "gates", "norm_largest", "data", "model", "lr"):
        assert first[key] == second[key], key
    assert not list((tmp_path / "scratch").rglob("checkpoint.json"))  # weights do not travel, and are not kept
    assert runner.work([run], whole, runner.Place(data, tmp_path, "cpu"), 1e6, train=None) == []  # done is done


def test_all_models_see_the_same_tokens_in_the_same_order(data, monkeypatch, tmp_path):
    seen = {}
    batch = Dataset.batch

    def noticed(self, rows):
        if self.split == "train":
            seen.setdefault(name, []).append(list(rows))
        return batch(self, rows)

    monkeypatch.setattr(Dataset, "batch", noticed)
    monkeypatch.setattr(training, "judge", lambda *given: {})
    for run in tables.runs("quick"):
        name = run.name
        training.train(run, data, 3e-3, tmp_path, "cpu", None)
    by_seed = [{json.dumps(seen[run.name]) for run in tables.runs("quick") if run.seed == seed} for seed in (0, 1)]
    assert [len(orders) for orders in by_seed] == [1, 1] and by_seed[0] != by_seed[1]


def made_up(run, loss, **changes):
    """A result as training.train makes it."""
    context, last = run.context, 0.0 if loss is None else loss
    curve = {
        "tokens": [1e6, 2e6, 3e6], "loss": [last + 2, last + 1, last], "norm": [1.0] * 3, "norm_max": [2.0] * 3,
        "input_gate_max": [None if run.model == "transformer" else -3.0] * 3,
    }  # fmt: skip
    gate = [{"mean": -1.25, "deviation": 0.5, "least": -9.0, "largest": 3.0}] * 2
    return {
        "about": ABOUT, "data": {"fingerprint": "0", "tokens": 4e7}, "lr": run.lr or 3e-3, "steps": run.steps,
        "context": context, "batch": run.batch, "seed": run.seed, "failed": None, "validation_loss": loss,
        "curve": curve, "spikes": 1, "norm_median": 1.0, "norm_largest": 2.0, "tokens": run.tokens, "mfu": 0.3,
        "tokens_per_second": 1000.0, "seconds": run.tokens / 1000.0 + 7,
        "gates": None if run.model == "transformer" else {"input": gate},
        "positions": {"context": context, "rows": 4, "tokens_per_bin": context // 4,
                      "loss": [last + 0.01 * j for j in range(32)]}, **changes,
    }  # fmt: skip


def test_the_budget_decides_what_is_begun(tmp_path, monkeypatch):
    found = Results(tmp_path)
    runs = [run for run in tables.runs("sweep-40m") if run.model == "exp"]
    found.add(runs[0], made_up(runs[0], 3.0, tokens_per_second=1e6, seconds=runs[0].tokens / 1e6 + 7))
    need = runner.estimate(runs[1], runner.measured(found))
    assert need.seconds == pytest.approx(24 + 7) and need.source == "measured rate"
    other = tables.runs("sweep-160m")[0]
    ratio = runner.operations(other) / runner.operations(runs[0])
    assert runner.estimate(other, runner.measured(found)).seconds == pytest.approx(16 * ratio + 7)
    assert runner.estimate(tables.runs("sweep-160m")[-1], runner.measured(found)) is None  # no Transformer yet
    begun = []

    def train(run, data, lr, scratch, device, limit):
        begun.append((run.name, lr, limit))
        return made_up(run, 3.0)

    place = runner.Place(tmp_path, tmp_path / "scratch", "cuda")
    assert runner.work(runs, found, place, 30, train) == runs[1:] and not begun
    monkeypatch.setattr(runner, "steps", lambda run: [5] if run.name == runs[2].name else [])
    assert runner.work(runs, found, place, 30, train) == [runs[1]]  # what has a checkpoint here goes on
    assert [name for name, _, _ in begun] == [runs[2].name] and begun[0][1] == 6e-3 and 29 < begun[0][2] <= 30
    stopped = []
    left = runner.work(runs, found, place, 1e6, lambda *given: stopped.append(given))  # a signal, or the limit
    assert left == [runs[1]] and len(stopped) == 1


def test_rates_come_from_the_sweep(tmp_path):
    found = Results(tmp_path)
    compare = tables.runs("compare-40m")[0]
    sweep = [run for run in tables.runs("sweep-40m") if run.model == compare.model]
    for run, loss in zip(sweep, (3.1, 3.0), strict=False):
        found.add(run, made_up(run, loss))
    with pytest.raises(ValueError, match="tfla: lr of 40m,exp,seed=0 comes from table sweep-40m"):
        found.rate(compare)
    found.add(sweep[2], made_up(sweep[2], None, failed="the loss is nan at step 3"))
    assert found.rate(compare) == sweep[1].lr == 3e-3 and found.best_rates("40m") == {"exp": 3e-3}


def test_tables_have_names_of_their_own_and_the_models_asked_for():
    for table in tables.TABLES:
        names = [run.name for run in tables.runs(table)]
        assert len(set(names)) == len(names)
    for size, millions, tokens in (("160m", (105, 115), 100e6), ("40m", (38, 45), 200e6)):
        runs = tables.runs(f"compare-{size}")
        seeds = {model: [run.seed for run in runs if run.model == model] for model in tables.MODELS}
        assert seeds == {"exp": [0, 1, 2], "sigmoid": [0, 1, 2], "transformer": [0]}
        assert all(run.steps * run.batch * run.context >= tokens for run in runs)
        with torch.device("meta"):  # 160m: with the corpus's vocabulary, not the paper's
            counts = [
                sum(x.numel() for x in LanguageModel(training.configs(run, 16384, 1e-3, "cpu")[0]).parameters())
                for run in runs
            ]
        assert all(millions[0] < count / 1e6 < millions[1] for count in counts)
    with pytest.raises(ValueError, match="tfla: table is 'none'"):
        tables.runs("none")


def test_results_of_several_machines_merge(tmp_path):
    runs = tables.runs("quick")
    here, there = Results(tmp_path / "here"), Results(tmp_path / "there")
    for number, run in enumerate(runs[:4]):
        (here if number < 2 else there).add(run, made_up(run, number))
    there.add(runs[0], made_up(runs[0], 99))
    assert main(["merge", str(tmp_path / "there"), "--results", str(tmp_path / "here")]) == 0
    assert [result["validation_loss"] for _, result in here.table("quick")] == [0, 1, 2, 3]
    assert results.merge(there.folder, here.folder) == 0
    both = Results(tmp_path / "new", here.folder)
    both.add(runs[5], made_up(runs[5], 5))
    assert [result["validation_loss"] for _, result in both.table("quick")] == [0, 1, 2, 3, 5]
    assert here.read(runs[5]) is None and both.read(runs[0])["validation_loss"] == 0
    here.add(runs[4], made_up(runs[4], 4, data={"fingerprint": "1"}))
    with pytest.raises(ValueError, match="tfla: results of table quick have data .* cannot be compared"):
        here.table("quick")


def test_the_listing_has_every_table_with_its_seconds(tmp_path, capsys):
    found = Results(tmp_path)
    for run in tables.runs("sweep-40m")[:4]:
        found.add(run, made_up(run, 3.0, tokens_per_second=1e6, seconds=31))
    assert main(["list", "--results", str(tmp_path)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line[0] != " "}
    assert {*tables.TABLES, "recall"} < set(rows)
    assert rows["sweep-40m"][1:3] == ["9", "4"] and rows["compare-160m"][4:6] == ["?", "?"]  # no Transformer yet
    for run in tables.runs("sweep-40m")[4:7]:
        found.add(run, made_up(run, 3.0, tokens_per_second=1e6, seconds=31))
    assert main(["list", "--results", str(tmp_path)]) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("sweep-40m"))
    assert row[1:6] == ["9", "7", "216.0", "31", "62"]
    text = (ROOT / "Makefile").read_text()
    assert "benchmarks.lm.experiments list" in text


# --- what is measured


def test_long_rows_lie_within_documents(data):
    validation = Dataset(data, "validation", 64)
    rows = measures.long_rows(validation, 512, 1000)
    stream = validation.stream(0, validation.tokens).tolist()
    documents = bytes(token if token < 256 else 0 for token in stream).split(b"\0")
    assert len(rows) == sum(len(document) // 512 for document in documents)
    assert all(any(bytes(row.tolist()) in document for document in documents) for row in rows)
    assert len(measures.long_rows(validation, 512, 5)) == 5
    with pytest.raises(ValueError, match="tfla: split 'validation' .* has 0 stretches of 9000 tokens"):
        measures.long_rows(validation, 9000, 5)


@pytest.mark.parametrize("changes", [{}, {"gate": "sigmoid"}, {"kind": "transformer"}], ids=str)
def test_loss_by_position_is_that_of_the_logits(data, changes):
    torch.manual_seed(0)
    model = LanguageModel(small_model(**changes))
    validation = Dataset(data, "validation", 64)
    result = measures.loss_by_position(model, validation, 64, most=4)
    rows = measures.long_rows(validation, 512, 4)
    inputs = torch.cat([torch.full((4, 1), EOD), rows[:, :-1]], dim=1)
    with torch.no_grad():
        losses = -model(inputs).double().log_softmax(dim=-1).gather(-1, rows[..., None])[..., 0]
    expected = [losses[:, 16 * j : 16 * j + 16].mean().item() for j in range(32)]
    assert result["loss"] == pytest.approx(expected, abs=2e-5) and result["tokens_per_bin"] == 16


def test_gates_are_those_of_their_formula(data):
    torch.manual_seed(0)
    model = LanguageModel(small_model())
    for block in model.blocks:
        torch.nn.init.normal_(block.mix.cell.input_gate.weight)
    validation = Dataset(data, "validation", 64)
    result = measures.gates(model, validation, rows=2)
    batch = validation.batch([0, 1])
    x = model.embedding(batch.inputs.reshape(1, -1))
    values = model.blocks[0].mix.cell.input_gate(model.blocks[0].norm_mix(x)).double()
    values = 15 * torch.tanh(values / 15)
    expected = {
        "mean": values.mean(), "deviation": values.std(correction=0), "least": values.min(), "largest": values.max(),
    }  # fmt: skip
    assert result["input"][0] == pytest.approx({name: x.item() for name, x in expected.items()}, abs=1e-3)
    assert len(result["input"]) == len(result["forget"]) == 2 and result["forget"][1]["mean"] > 2
    assert measures.gates(LanguageModel(small_model(kind="transformer")), validation) is None


def lines(norms):
    return [
        {"loss": 5.0 - j, "gradient_norm": norm, "input_gate_max": None, "tokens": j, "tokens_per_second": 2.0 + j % 3,
         "mfu": None} for j, norm in enumerate(norms)
    ]  # fmt: skip


def test_spikes_are_counted_at_full_resolution():
    norms = [9.0] * 10 + [1.0] * 490
    norms[200], norms[300], norms[301] = 3.1, 2.9, 50.0
    result = curves.reduced(lines(norms), 10)
    assert result["spikes"] == 2 and result["first_spikes"] == [[201, 3.1], [302, 50.0]]
    assert result["norm_largest"] == 50.0 and result["norm_median"] == 1.0 and result["tokens_per_second"] == 3.0
    curve = result["curve"]
    assert len(curve["loss"]) == 167 <= curves.POINTS and curve["loss"][0] == 4.0 and curve["norm_max"][100] == 50.0
    assert curve["tokens"][-1] == 499 and curve["norm"][100] == 2.9 and curve["input_gate_max"] == [None] * 167
    broken = lines([1.0] * 20)
    broken[-1]["loss"] = math.nan
    assert curves.reduced(broken, 2)["curve"]["tokens"][-1] == 18


def test_differences_are_judged_by_seeds_in_pairs():
    first, second = {0: 3.2, 1: 3.5, 2: 3.9, 7: 1.0}, {0: 3.1, 1: 3.3, 2: 3.6}
    gap = judgement.difference(first, second)
    assert (gap.mean, gap.deviation, gap.seeds) == (pytest.approx(0.2), pytest.approx(0.1), 3)
    assert gap.margin == pytest.approx(4.303 * 0.1 / 3**0.5) and not gap.shown
    text = judgement.sentence("A", "B", gap, "Loss", " nats")
    assert "+0.2000 nats" in text and "No difference follows" in text and "below 0.4484 nats" in text
    close = judgement.difference({0: 3.2, 1: 3.21, 2: 3.19}, {0: 3.0, 1: 3.0, 2: 3.0})
    assert close.shown and "It follows that B is better" in judgement.sentence("A", "B", close, "Loss", "")
    assert "It follows that A is better" in judgement.sentence(
        "A", "B", dataclasses.replace(close, mean=-close.mean), "Loss", ""
    )
    single = judgement.difference({0: 1.0}, {0: 3.0})
    assert not single.shown and "Nothing follows" in judgement.sentence("A", "B", single, "Loss", "")
    assert judgement.difference({0: 1.0}, {1: 1.0}) is None
    assert judgement.spread([1.0, 2.0, 4.0], 2) == "2.33 ± 1.53" and judgement.spread([1.0], 1) == "1.0"
    (line,) = judgement.beside("T", 4.0, {"A": [1.0, 2.0, 3.0], "B": [1.0]}, "")
    assert "+2.0000, 2.0 times the deviation" in line


# --- recall


def test_rows_of_recall_ask_for_what_they_hold():
    task = recall.Task(keys=9, values=5, queries=7)
    inputs, targets = recall.rows(task, 6, 200, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (200, 2 * (6 + 7))
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(row[:12:2], row[1:12:2], strict=True))
        assert len(pairs) == 6 and max(pairs) < 9 and all(9 <= value < 14 for value in pairs.values())
        asked = [(place, key) for place, key in enumerate(row) if place >= 12 and place % 2 == 0]
        assert all(wanted[place] == row[place + 1] == pairs[key] for place, key in asked)
        assert sum(target != -1 for target in wanted) == len(asked) == 7
        assert set(row[12:24:2]) == set(pairs)  # each is asked before one is asked again
    with pytest.raises(ValueError, match="tfla: pairs is 10; it must be from 1 to the 9 keys"):
        recall.rows(task, 10, 1, torch.Generator())


class Knows(torch.nn.Module):
    """Says the value that followed a key before, or another value of the row."""

    def __init__(self, vocab, right):
        super().__init__()
        self.weight, self.vocab, self.right = torch.nn.Parameter(torch.zeros(1)), vocab, right

    def forward(self, inputs):
        logits = torch.zeros(*inputs.shape, self.vocab)
        for b, row in enumerate(inputs.tolist()):
            for t, token in enumerate(row):
                if t % 2 == 0 and token in row[:t:2]:
                    place = row.index(token) + 1
                    logits[b, t, row[place if self.right else (place + 2) % 8]] = 1
        return logits


def test_accuracy_of_who_knows_and_who_does_not():
    task = recall.Task(keys=8, values=400, queries=4, tests=64)
    assert recall.accuracy(Knows(task.vocab, True), task, 4, 0) == 1.0
    assert recall.accuracy(Knows(task.vocab, False), task, 4, 0) < 0.05


@pytest.mark.parametrize("model", tables.MODELS)
def test_models_learn_from_what_is_asked_alone(model):
    task = recall.Task(keys=4, values=4, queries=2, trained=(1,), asked=(1, 3), dim=32, steps=120, tests=32, lr=1e-2)
    result = recall.learn(task, model, 0, "cpu")
    assert result["accuracy"]["1"] > 0.9 > result["accuracy"]["3"] and result["loss"][-1] < 0.5 * result["loss"][0]
    assert result["parameters"] == sum(x.numel() for x in LanguageModel(recall.config(task, model)).parameters())


def test_recall_goes_on_where_it_stopped(tmp_path, monkeypatch):
    task = recall.Task(keys=4, values=4, queries=2, trained=(2,), asked=(2,), dim=16, steps=2, tests=2)
    begin = time.monotonic()
    recall.work(tmp_path, "cpu", 0.0, task)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(recall, "SEEDS", 1)
    recall.work(tmp_path, "cpu", 60.0, task)
    assert [result["model"] for result in recall_page.read(tmp_path)] == sorted(tables.MODELS)
    monkeypatch.setattr(recall, "learn", None)
    recall.work(tmp_path, "cpu", 60.0, task)
    assert time.monotonic() - begin < 60


# --- the page


def fill(folder, gap=0.1):
    """Results of every table. mLSTMsig is worse than mLSTMexp by gap, up to a thousandth from seed to seed."""
    found = Results(folder)
    for table in tables.TABLES:
        for run in tables.runs(table):
            loss = 3.0 + 0.05 * run.seed + (gap + 0.001 * run.seed) * (run.model == "sigmoid")
            loss += 0.5 * (run.model == "transformer") + 10 * abs((run.lr or 3e-3) - 3e-3)
            loss += 0.02 * (run.changes.get("input_gate_bias") == 0.0) * (1 + 0.1 * run.seed)
            found.add(run, made_up(run, loss))
    task = recall.Task()
    for model in tables.MODELS:
        for seed in range(3):
            accuracy = {str(n): 0.99 - 0.02 * (model == "sigmoid") * (n > 8) + 0.001 * seed for n in task.asked}
            line = {"about": ABOUT, "task": dataclasses.asdict(task), "model": model, "seed": seed, "parameters": 7}
            results.add_line(folder / recall.FILE, f"{model},{seed}", {**line, "seconds": 60.0, "accuracy": accuracy})
    return found


def test_the_page_says_what_follows(tmp_path):
    text = page.page(fill(tmp_path))
    assert "| mLSTMexp | 3 | 0.003 | 100.0 M | 3.0500 ± 0.0500 | 21.133 ± 1.056 |" in text
    assert "3,052 steps of 16 x 2048 tokens on the corpus, 2.5 times its training tokens; the same tokens" in text
    assert "| Transformer | 1 | 0.003 | 100.0 M | 3.5000 | 33.115 |" in text
    assert text.count("It follows that mLSTMexp is better here") == 2  # by validation loss of two sizes
    assert "Validation loss of mLSTMsig minus that of mLSTMexp: +0.1010 nats (95 % interval +0.0985 to +0.1035" in text
    assert "Transformer (one seed) minus the mean of mLSTMexp: +0.4500 nats, 9.0 times" in text
    assert "bias 0 with eps 0.01 +0.0220 ± 0.0050" in text and "bias -2" not in text
    assert "where it excludes 0: 12 pairs -2.0" in text
    assert "| input | -9.0 to 3.0 | -1.2 ± 0.5 | -1.2 ± 0.5 |" in text and "not done yet" not in text
    assert "The best rate of mLSTMexp is the least tried." not in text
    assert "| mLSTMexp | 3 | 3.0800 ± 0.0500 | 3.1200 ± 0.0500 |" in text  # the last bins of 1 and 2 contexts


def test_the_page_says_where_nothing_follows(tmp_path):
    found = fill(tmp_path, gap=-0.0005)
    runs = tables.runs("compare-160m")
    for run, loss in zip(runs, (3.0, 3.1, 3.5, 3.1, 3.0, 3.0, 3.05), strict=True):
        found.add(run, made_up(run, loss))
    text = page.page(found)
    line = next(line for line in text.splitlines() if line.startswith("- Validation loss of mLSTMsig"))
    assert "No difference follows: the interval holds 0" in line and "It follows" not in line


def test_the_page_of_little_is_short_and_says_what_is_missing(tmp_path):
    found = Results(tmp_path)
    assert page.page(found).count("\n") == 3
    runs = tables.runs("compare-40m")
    found.add(runs[0], made_up(runs[0], 3.0, lr=1e-3))
    found.add(runs[1], made_up(runs[1], None, failed="the loss is nan at step 5", gates=None, positions=None, lr=1e-3))
    text = page.page(found)
    assert "5 of 7 runs are not done yet." in text and "mLSTMsig minus" not in text
    assert re.search(r"\| mLSTMsig \| 1 \| 0.001 \| 200.0 M \|  \|  \|  \| 2.00 \| 1 \| 1 \|", text)
    sweep = tables.runs("sweep-40m")
    for run in sweep[:3]:
        found.add(run, made_up(run, 3.0 + run.lr))
    text = page.page(found)
    assert "| mLSTMexp | **3.0015** | 3.0030 | 3.0060 |" in text and "mLSTMexp is the least tried." in text


class Pyplot:
    """Stands in for matplotlib, which tests do not need: remembers what is drawn, and writes the files."""

    def __init__(self):
        self.drawn = []

    def subplots(self, rows=1, columns=1, **options):
        panels = [self] * (rows * columns)
        return self, panels if len(panels) > 1 else panels[0]

    def savefig(self, path, **options):
        path.write_text("")

    def plot(self, x, y, *style, **options):
        assert len(x) == len(y)
        self.drawn.append(list(y))

    def __getattr__(self, name):
        return lambda *given, **options: None


def test_every_picture_of_the_page_is_drawn(tmp_path):
    found = fill(tmp_path / "results")
    pyplot = Pyplot()
    drawn = plots.draw(found, tmp_path / "out", pyplot)
    assert set(drawn) == set(re.findall(r"\]\((\S+\.png)\)", page.page(found)))
    assert all((tmp_path / "out" / name).exists() for name in drawn)
    assert plots.band([[1.0, 2.0], [3.0, 5.0, 9.0]]) == ([2.0, 3.5], [1.0, 2.0], [3.0, 5.0])
    assert any(values == pytest.approx([5.05, 4.55, 4.05]) for values in pyplot.drawn)  # means over steps and seeds


def test_the_page_in_the_repository_is_that_of_its_results():
    assert (common.OUT / "language_models.md").read_text() == page.page(Results(common.OUT / "results"))
    text = (common.OUT / "language_models.md").read_text()
    assert all((common.OUT / name).exists() for name in re.findall(r"\]\((\S+\.png)\)", text))


def test_the_shape_of_the_paper_is_that_of_its_preset():
    run = tables.runs("compare-160m")[0]
    assert training.configs(run, 50304, 1e-3, "cpu")[0] == preset("160m")
