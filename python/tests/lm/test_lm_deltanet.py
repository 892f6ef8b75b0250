"""The kind deltanet of tfla.lm: its formula in float64, beginning, cost, generation, training, what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tfla.lm
from lm_inputs import EOD, PROMPTS, greedy, make_data, small_model, small_recipe
from lm_worker import options
from test_lm_model import make_model, rms
from tfla.lm import LanguageModel, preset
from tfla.lm.cli import main
from tfla.lm.commands.bench import subjects_on
from tfla.lm.generate import Sampling, Session, complete, generate
from tfla.lm.models.init import small, wang
from tfla.lm.training.metrics import flops_per_token, read_log
from tfla.lm.training.optimizer import decays
from tfla.lm.training.train import resume_options, train
from tfla.reference import delta_recurrence, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET = ["--device", "cpu", "--no-tensorboard", "--no-progress", "--peak-flops", "1e9"]
VARIANTS = [
    {},
    {"v_heads": 4, "expand_v": 1.0, "head_dim": 8, "allow_neg_eigval": True, "fuse": True},
    {"use_decay": False, "use_gate": False, "conv_size": 2, "cell_norm_eps": 1e-2},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("lm"))


def delta_model(**changes) -> LanguageModel:
    return make_model(kind="deltanet", **changes)


def formula(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of rows of one document, in float64."""
    config, w = model.config, {name: value.double() for name, value in model.state_dict().items()}
    x = w["embedding.weight"][tokens]
    for layer in range(config.layers):
        p = f"blocks.{layer}.mix."
        y = rms(x, w[f"blocks.{layer}.norm_mix.weight"], config.norm_eps)

        def mixed(name, heads, y=y, p=p):
            z, kernel = F.linear(y, w[f"{p}{name}_proj.weight"]), w[f"{p}{name}_conv1d.weight"][:, 0]
            size = kernel.shape[1]
            padded = torch.cat([torch.zeros_like(z[:, : size - 1]), z], 1)
            z = sum(padded[:, j : j + z.shape[1]] * kernel[:, j] for j in range(size))
            return (z * torch.sigmoid(z)).unflatten(-1, (heads, -1))

        gates = {"write": "twice_sigmoid" if config.allow_neg_eigval else "sigmoid", "normalize_qk": True}
        a = None
        if config.use_decay:
            gates |= {"A_log": w[p + "A_log"], "dt_bias": w[p + "dt_bias"]}
            a = F.linear(y, w[p + "a_proj.weight"])
        q, k, v = mixed("q", config.heads), mixed("k", config.heads), mixed("v", config.values)
        h, _ = delta_recurrence(q, k, v, F.linear(y, w[p + "b_proj.weight"]), a, **gates)
        h = rms(h, w[p + "o_norm.weight"], config.cell_norm_eps).flatten(-2)
        if config.use_gate:
            h = h * F.silu(F.linear(y, w[p + "g_proj.weight"]))
        x = x + F.linear(h, w[p + "o_proj.weight"])
        p = f"blocks.{layer}."
        y = rms(x, w[p + "norm_ffn.weight"], config.norm_eps)
        gate, up = (F.linear(y, w[f"{p}ffn.{name}.weight"]) for name in ("gate", "up"))
        x = x + F.linear(gate * torch.sigmoid(gate) * up, w[p + "ffn.down.weight"])
    logits = F.linear(rms(x, w["norm.weight"], config.norm_eps), w["head.weight"])
    return 30 * torch.tanh(logits / 30)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_model_is_its_formula(changes):
    model, tokens = delta_model(**changes), torch.randint(0, EOD, (2, 37))
    with torch.no_grad():
        assert relative_error(model(tokens), formula(model, tokens)) < 1e-5


def test_initial_weights():
    torch.manual_seed(0)
    model = LanguageModel(preset("tiny", kind="deltanet", vocab=64))
    mix = model.blocks[0].mix
    reads = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
    expected = {getattr(mix, name): small(128) for name in reads} | {mix.o_proj: wang(128, 4)}
    for module, std in expected.items():
        # Five standard errors of a standard deviation.
        assert module.weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * module.weight.numel()))
    assert (mix.head_dim, mix.head_v_dim, mix.num_v_heads) == (48, 96, 2)
    assert 1 <= mix.A_log.exp().min() and 1e-3 * 0.999 < F.softplus(mix.dt_bias).min()
    assert mix.q_conv1d.weight.abs().max() <= 0.5 and mix.o_norm.weight.unique().tolist() == [1.0]


@pytest.mark.parametrize(("name", "heads", "head_dim"), [("160m", 6, 96), ("400m", 6, 128), ("1.4b", 6, 256)])
def test_presets_and_cost(name, heads, head_dim):
    config = preset(name, kind="deltanet")
    assert (config.heads, config.keys) == (heads, head_dim)
    with torch.device("meta"):
        model = LanguageModel(config)
    products = sum(x.numel() for name, x in model.named_parameters() if decays(name, x))
    # Six operations per weight of a product; what is left is the recurrence and the convolutions.
    recurrence, width = 6 * heads * head_dim * 2 * head_dim, heads * head_dim * 4
    assert flops_per_token(config, 8192) == 6 * products + 3 * config.layers * (recurrence + 2 * 4 * width)


def test_weight_decay_is_for_linear_weights():
    model = delta_model()
    decayed = {name.split("mix.")[1] for name, x in model.named_parameters() if "mix." in name and decays(name, x)}
    assert decayed == {f"{x}_proj.weight" for x in "qkvabgo"}


def test_generates(tmp_path):
    """Prompts packed, then token by token, saved and loaded in between, against the whole sequence each time."""
    model = delta_model().eval()
    expected = [greedy(model, prompt, 10) for prompt in PROMPTS]
    assert complete(model, PROMPTS, 10, Sampling(temperature=0)) == expected
    session = Session(model, PROMPTS)
    first = list(generate(session, 4, Sampling(temperature=0)))
    session.save(tmp_path / "s.pt")
    second = list(generate(Session.load(model, tmp_path / "s.pt"), 6, Sampling(temperature=0)))
    assert [list(row) for row in zip(*first, *second, strict=True)] == expected
    # More text of theirs, packed again, from the states that are there.
    more = [[7, 8, 9], [7], [7, 8], [9] * 5]
    session.feed(more)
    texts = [p + e[:4] + m for p, e, m in zip(PROMPTS, expected, more, strict=True)]
    with torch.no_grad():
        whole = torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])
    assert relative_error(session.logits, whole) < 1e-5


def test_decodes_in_slots():
    model, tokens = delta_model().eval(), torch.randint(0, EOD, (3, 9))
    with torch.no_grad():
        _, states = model.prefill(tokens)
        pool = model.new_states(5)
        for slot, state in zip(pool, states, strict=True):
            for into, rows in zip(slot, state, strict=True):
                into[[4, 0, 2]] = rows
        expected = model.decode(tokens[:, 0], states)
        actual = model.decode(tokens[:, 0], pool, slots=torch.tensor([4, 0, 2]))
    assert relative_error(actual, expected) < 1e-6


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run / "log.jsonl") if "loss" in line]


def test_trains_and_goes_on_bit_for_bit(data, tmp_path):
    config, recipe = small_model(kind="deltanet", layers=1), small_recipe(steps=10)
    train(config, recipe, data, options(tmp_path / "whole"))
    seen = losses(tmp_path / "whole")
    assert len(seen) == 10 and seen[-1] < seen[0] - 0.2
    train(config, recipe, data, options(tmp_path / "run", stop_after=4))
    again, *_ = resume_options(tmp_path / "run")
    assert again == config
    train(again, recipe, data, options(tmp_path / "run"))
    assert losses(tmp_path / "run") == seen


def test_on_the_command_line(data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = "--kind deltanet --layers 1 --dim 32 --context 32 --batch 2 --steps 3 --warmup 1 --cooldown 1"
    command = ["train", "--data", str(data), "--out", "run", *fields.split(), *QUIET]
    assert main([*command, "--conv-size", "3", "--allow-neg-eigval"]) == 0
    saved = json.loads(Path("run/step-00000003/checkpoint.json").read_text())["model"]
    assert saved["conv_size"] == 3 and saved["allow_neg_eigval"] is True and "gate" not in saved
    assert main(["eval", "run", "--device", "cpu"]) == 0
    assert main(["generate", "run", "the", "--device", "cpu", "--max-tokens", "3"]) == 0
    bench = "bench --device cpu --sizes tiny --layers 1 --vocab 64 --context 16 --batch 1 --steps 1 --no-compile"
    assert main([*bench.split(), "--models", "deltanet"]) == 0 and "| tiny | deltanet |" in capsys.readouterr().out
    new = [*command[:4], "new", *command[5:]]
    for bad, sentence in {
        ("export", "run", "--layout", "xlstm", "--out", "x"): "kind is 'deltanet', which the layout 'xlstm' cannot say",
        (
            "export",
            "run",
            "--layout",
            "huggingface",
            "--out",
            "x",
        ): "kind is 'deltanet', which the layout 'hugg",
        (*new, "--heads", "5"): "heads is 5 for dim 32; it must divide 3/4 of dim",
        (*new, "--v-heads", "3"): "v_heads is 3; it must be a multiple of heads, 2",
        (*new, "--expand-v", "1.3"): "expand_v is 1.3; times head_dim 12 it must be a whole number",
        (*new, "--conv-size", "0"): "conv_size is 0; it must be positive",
    }.items():
        assert main(list(bad)) == 2
        assert sentence in capsys.readouterr().err
    assert not Path("new").exists()


def test_cuda_is_refused_before_anything_is_written(data, tmp_path, monkeypatch):
    world = tfla.lm.training.parallel.World(device=torch.device("cuda", 1))
    monkeypatch.setattr("tfla.lm.training.train.join", lambda recipe, device: world)
    with pytest.raises(ValueError, match="^tfla: device is 'cuda:1' for kind 'deltanet', which runs on 'cpu' alone$"):
        train(small_model(kind="deltanet"), small_recipe(), data, options(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert "deltanet" in subjects_on(torch.device("cpu")) and "deltanet" not in subjects_on(torch.device("cuda"))
    assert {"exp", "transformer"} <= set(subjects_on(torch.device("cuda")))
