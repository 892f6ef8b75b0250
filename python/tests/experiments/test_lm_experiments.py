"""benchmarks/lm/experiments: runs in pieces, results that merge, and what is measured of a model."""

import json
import math
import random
import sys

import pytest
import torch

from lm_inputs import EOD, ROOT, WORDS, small_model
from lm_results import made_up
from tfla.lm import LanguageModel, preset
from tfla.lm.data import Dataset
from tfla.lm.data.prepare import Source, prepare

sys.path.append(str(ROOT))

from benchmarks.lm.experiments import (  # noqa: E402
    curves,
    measures,
    results,
    runner,
    tables,
    training,
)  # fmt: skip
from benchmarks.lm.experiments.__main__ import main  # noqa: E402
from benchmarks.lm.experiments.results import Results  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_the_shape_of_the_paper_is_that_of_its_preset():
    run = tables.runs("compare-160m")[0]
    assert training.configs(run, 50304, 1e-3, "cpu")[0] == preset("160m")
