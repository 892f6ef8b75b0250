"""Which layers of a model keep their states for backward, and that no choice changes a loss."""

import pytest
import torch

import tfla.lm.training.keeping as keeping
from lm_inputs import make_data, small_model, small_recipe
from tfla import info
from tfla.lm import LanguageModel, preset
from tfla.lm.commands.bench import measure
from tfla.lm.data import Dataset
from tfla.lm.data.dataset import boundaries
from tfla.lm.models.base import Rows, find
from tfla.lm.training.keeping import keep_for_backward, layers_within
from tfla.lm.training.metrics import read_log
from tfla.lm.training.parallel import World
from tfla.lm.training.timing import Setting
from tfla.lm.training.train import Run, train

CHOICES = [{}, {"keep_for_backward": "states"}, {"keep_for_backward": "auto", "keep_budget_gb": 1e-6}]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("keep"))


@pytest.mark.parametrize(
    ("budget", "each", "layers"),
    [(0, 100, 0), (1e-7, 100, 1), (1.99e-7, 100, 1), (2e-7, 100, 2), (1, 100, 4), (0, 0, 4)],
)
def test_layers_within_a_budget(budget, each, layers):
    assert layers_within(budget, each, 4) == layers


@pytest.mark.parametrize(("size", "layers"), [("400m", 14), ("1.4b", 7)])
def test_layers_of_a_gpu(monkeypatch, size, layers):
    """Of 8 rows of 8,192 tokens on an H200: 512 states of 2 bytes dqk dhv and 4 bytes dqk in each head of a layer."""
    config, rows = preset(size), Rows(8, 8192)
    kind, dqk, dhv = find(config.kind), config.dim // 2 // config.heads, config.dim // config.heads
    each = kind.state_bytes(config, rows, torch.bfloat16, gpu="H200")
    assert each == 512 * config.heads * dqk * (2 * dhv + 4)
    with torch.device("meta"):
        model = LanguageModel(config, torch.bfloat16)
    plan = info.saved
    monkeypatch.setattr(info, "saved", lambda **call: plan(**{**call, "gpu": "H200"}))
    recipe = small_recipe(keep_for_backward="auto", keep_budget_gb=(layers + 0.5) * each / 1e9)
    assert keep_for_backward(model, recipe, World(device=torch.device("cuda")), rows) == layers
    kept = [block.mix.cell.keep for block in model.blocks]
    assert kept == ["states"] * layers + ["denominators"] * (config.layers - layers)


def test_packed_rows_have_a_state_more_for_every_sequence():
    config = preset("1.4b")
    sizes = [
        find("xlstm").state_bytes(config, Rows(8, 8192, sequences), torch.bfloat16, gpu="H200")
        for sequences in (None, 63, 127)
    ]
    assert [size // (config.heads * 128 * (2 * 256 + 4)) for size in sizes] == [512, 512 + 63, 512 + 127]
    soft = preset("1.4b", reset="soft")  # whose rows are not laid end to end
    assert find("xlstm").state_bytes(soft, Rows(8, 8192, 63), torch.bfloat16, gpu="H200") == sizes[0]


def test_sequences_of_rows(data):
    """As many as the boundaries of a batch of average documents have."""
    split = Dataset(data, "train", 48)
    for rows in (1, 4, split.whole_rows):
        batch = split.batch(range(rows))
        assert split.sequences(rows) == len(boundaries(batch.documents.starts)) - 1


def test_a_transformer_has_no_states():
    config = small_model(kind="transformer")
    assert find("transformer").state_bytes(config, Rows(8, 8192), torch.bfloat16) == 0
    model = LanguageModel(config)
    assert keep_for_backward(model, small_recipe(**CHOICES[1]), World(), Rows(1, 8)) == config.layers


def test_every_choice_trains_alike(data, tmp_path, monkeypatch):
    """Bit for bit on a CPU, which keeps nothing; and the layers are told."""
    told, found = [], []
    choose = keeping.keep_for_backward

    def spy(model, *rest):
        layers = choose(model, *rest)
        told.append([block.mix.cell.keep for block in model.blocks])
        return layers

    monkeypatch.setattr("tfla.lm.training.train.keep_for_backward", spy)
    for number, choice in enumerate(CHOICES):
        run = tmp_path / str(number)
        train(small_model(), small_recipe(**choice), data, Run(run, device="cpu", progress=False, tensorboard=False))
        found.append([(line["loss"], line["gradient_norm"]) for line in read_log(run / "log.jsonl")])
    assert told == [["denominators"] * 2, ["states"] * 2, ["states"] * 2]
    assert len(found[0]) == 6 and found[0] == found[1] == found[2]


def test_a_run_may_go_on_with_another_choice(data, tmp_path):
    run = Run(tmp_path / "run", device="cpu", progress=False, tensorboard=False, stop_after=3)
    train(small_model(), small_recipe(), data, run)
    on = Run(tmp_path / "run", device="cpu", progress=False, tensorboard=False)
    assert train(small_model(), small_recipe(**CHOICES[2]), data, on)["finished"]


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"keep_for_backward": "all"}, "keep_for_backward is 'all'; it must be 'denominators' or 'states' or 'auto'"),
        ({"keep_for_backward": "auto"}, "keep_budget_gb is None with keep_for_backward 'auto'; 'auto' needs a number"),
        ({"keep_budget_gb": 2.0}, "keep_budget_gb is 2.0 with keep_for_backward 'denominators'; .* no other takes one"),
        ({"keep_for_backward": "auto", "keep_budget_gb": -1.0}, "keep_budget_gb is -1.0; it must be at least 0"),
    ],
    ids=str,
)
def test_refused(choice, sentence):
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        small_recipe(**choice)
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        Setting("tiny", device="cpu", **choice)


def test_bench_takes_it():
    setting = Setting(
        "tiny", device="cpu", context=16, batch=1, steps=1, compile=False, layers=1, vocab=64, **CHOICES[2]
    )
    assert measure("exp", setting)["milliseconds"] > 0
