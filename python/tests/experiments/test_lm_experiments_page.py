"""benchmarks/lm/experiments: recall, and what the page says of made-up results."""

import dataclasses
import re
import sys
import time

import pytest
import torch

from lm_inputs import ROOT
from lm_results import ABOUT, made_up
from tfla.lm import LanguageModel

sys.path.append(str(ROOT))

from benchmarks.lm.experiments import common, judgement, page, plots, recall, recall_page, results, tables  # noqa: E402
from benchmarks.lm.experiments.results import Results  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


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
