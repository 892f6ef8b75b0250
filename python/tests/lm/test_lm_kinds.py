"""A kind of model is one file and one row: a third one goes through every command, and nobody else knows kinds."""

import ast
import json
from pathlib import Path

import pytest
import torch

import tfla.lm
from lm_inputs import PROMPTS, greedy, make_data, small_model, small_recipe
from lm_third_model import AverageConfig, Averages
from lm_worker import options
from tfla.lm import LanguageModel, ModelConfig, convert, preset
from tfla.lm.cli import main
from tfla.lm.data import Dataset
from tfla.lm.evaluate import evaluate
from tfla.lm.generate import Sampling, Session, complete, generate
from tfla.lm.models import KINDS, all_fields
from tfla.lm.training import checkpoint
from tfla.lm.training.metrics import flops_per_token, read_log
from tfla.lm.training.train import resume_options, train

pytestmark = pytest.mark.usefixtures("one_thread")
PACKAGE = Path(tfla.lm.__file__).parent
QUIET = ["--device", "cpu", "--no-tensorboard", "--no-progress", "--peak-flops", "1e9"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The row."""
    monkeypatch.setitem(KINDS, "average", Averages())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("lm"))


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run / "log.jsonl") if "loss" in line]


def test_third_model_trains_resumes_evaluates(data, tmp_path):
    config, recipe = small_model(kind="average", decay=0.5), small_recipe(steps=12)
    assert type(config) is AverageConfig
    train(config, recipe, data, options(tmp_path / "whole"))
    seen = losses(tmp_path / "whole")
    assert len(seen) == 12 and seen[-1] < seen[0] - 0.2
    train(config, recipe, data, options(tmp_path / "run", stop_after=5))
    again, *_ = resume_options(tmp_path / "run")
    assert again == config
    train(again, recipe, data, options(tmp_path / "run"))
    assert losses(tmp_path / "run") == seen
    with pytest.raises(ValueError, match="was trained with decay 0.5, this run has 0.75"):
        train(small_model(kind="average"), recipe, data, options(tmp_path / "run"))
    model, meta = checkpoint.load_model(tmp_path / "run")
    assert meta["model"]["decay"] == 0.5 and "gate" not in meta["model"]
    result = evaluate(model.eval(), Dataset(data, "validation", 48), batch=4)
    assert result.loss == pytest.approx(read_log(tmp_path / "run" / "log.jsonl")[-1]["validation_loss"], rel=1e-6)


def test_third_model_generates(tmp_path):
    torch.manual_seed(0)
    model = LanguageModel(small_model(kind="average")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    expected = [greedy(model, prompt, 10) for prompt in PROMPTS]
    assert complete(model, PROMPTS, 10, Sampling(temperature=0)) == expected
    session = Session(model, PROMPTS)
    first = list(generate(session, 4, Sampling(temperature=0)))
    session.save(tmp_path / "s.pt")
    second = list(generate(Session.load(model, tmp_path / "s.pt"), 6, Sampling(temperature=0)))
    assert [list(row) for row in zip(*first, *second, strict=True)] == expected


def test_third_model_on_the_command_line(data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = "--kind average --decay 0.9 --layers 1 --dim 32 --context 32 --batch 2 --steps 4 --warmup 1 --cooldown 1"
    command = ["train", "--data", str(data), "--out", "run", *fields.split(), *QUIET]
    assert main([*command, "--stop-after", "2"]) == 0
    assert main(["train", "--out", "run", *QUIET]) == 0 and "step 4 of 4: finished" in capsys.readouterr().out
    assert json.loads(Path("run/step-00000004/checkpoint.json").read_text())["model"]["decay"] == 0.9
    assert main(["eval", "run", "--device", "cpu", "--chunk-size", "16"]) == 0
    assert main(["generate", "run", "the", "--device", "cpu", "--max-tokens", "3"]) == 0
    bench = "bench --device cpu --sizes tiny --layers 1 --vocab 64 --context 16 --batch 1 --steps 1 --no-compile"
    assert main([*bench.split(), "--models", "average"]) == 0 and "| tiny | average |" in capsys.readouterr().out
    for bad, sentence in {
        ("export", "run", "--layout", "xlstm", "--out", "x"): "kind is 'average', which the layout 'xlstm' cannot say",
        (*command[:4], "new", *command[5:], "--decay", "1.5"): "decay is 1.5; it must be at least 0 and below 1",
        (*command[:4], "new", *command[5:], "--dim", "33"): "dim is 33; an average has an even one",
        (*command[:4], "new", *command[5:], "--kind", "xlstm", "--heads", "5"): "qk_factor makes 16 of dim 32",
    }.items():
        assert main(list(bad)) == 2
        assert sentence in capsys.readouterr().err


def test_fields_of_a_kind():
    assert preset("tiny", kind="average").heads == 1
    with pytest.raises(AttributeError):
        preset("tiny", kind="transformer").gate  # noqa: B018
    # One set of options may be tried with several kinds: what only others have is left out.
    assert preset("tiny", kind="transformer", gate="sigmoid", decay=0.5) == preset("tiny", kind="transformer")
    assert ModelConfig(2, 32, 4, 64, "transformer") == small_model(heads=4, vocab=64, kind="transformer")
    for arguments, named in (((1,) * 10, {}), ((2, 32, 4), {"layers": 3})):
        with pytest.raises(TypeError, match="^tfla: ModelConfig is given a field twice, or more than the 9"):
            ModelConfig(*arguments, **named)
    with pytest.raises(ValueError, match="kind is 'rnn'; it must be 'xlstm', 'transformer', 'deltanet' or 'average'"):
        preset("tiny", kind="rnn")
    with pytest.raises(ValueError, match="kind is 3; it must be"):
        ModelConfig(2, 32, 4, kind=3)
    assert flops_per_token(small_model(kind="average"), 48) == 3 * (
        2 * (2 * (2 * 32**2 + 3 * 32 * 128) + 3 * 32) + 2 * 32 * 320
    )


@pytest.mark.parametrize("kind", ["transformer", "deltanet", "average"])
def test_context_parallel_is_refused_before_anything_is_written(data, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("tfla.lm.training.train.join", lambda recipe, device: tfla.lm.training.parallel.World())
    with pytest.raises(ValueError, match=f"context_parallel is given for kind '{kind}'; only xlstm has it"):
        train(small_model(kind=kind), small_recipe(context_parallel=2), data, options(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_files_of_version_0_1_hold_the_fields_of_all_kinds(data, tmp_path):
    """Every checkpoint had gate and rope_base, whatever its kind."""
    for kind in ("xlstm", "transformer"):
        run = tmp_path / kind
        train(small_model(kind=kind), small_recipe(), data, options(run, stop_after=3))
        file = run / "step-00000003" / "checkpoint.json"
        meta = json.loads(file.read_text())
        others = {name: field.default for name, (_, field) in all_fields().items() if name not in meta["model"]}
        assert "decay" in others and ("rope_base" in others) != ("gate" in others)
        meta["model"] |= others
        file.write_text(json.dumps(meta))
        config, recipe, _ = resume_options(run)
        assert config == small_model(kind=kind)
        assert train(config, recipe, data, options(run))["begun_at"] == 3
    model, _ = checkpoint.load_model(tmp_path / "xlstm")
    session = Session(model.eval(), PROMPTS)
    session.save(tmp_path / "s.pt")
    content = torch.load(tmp_path / "s.pt", weights_only=True)
    content["model"]["rope_base"] = 10000.0
    torch.save(content, tmp_path / "s.pt")
    assert torch.equal(Session.load(model, tmp_path / "s.pt").logits, session.logits)


def test_another_kind_is_the_first_difference(data, tmp_path):
    train(small_model(), small_recipe(), data, options(tmp_path / "run", stop_after=1))
    with pytest.raises(ValueError, match="was trained with kind 'xlstm', this run has 'transformer'"):
        train(small_model(kind="transformer"), small_recipe(), data, options(tmp_path / "run"))


def test_weights_of_no_kind(tmp_path):
    from safetensors.torch import save_file

    save_file({"model.embed.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="^tfla: .* holds no weights of a published xlstm"):
        convert.import_model(tmp_path)


def names_of_kinds(text: str) -> list[int]:
    """Lines of a program that hold the name of a kind as a text of its own, as a comparison with it needs."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return [node.lineno for node in nodes if isinstance(node.value, str) and node.value in KINDS]


def test_kinds_are_named_in_models_alone():
    assert names_of_kinds("if config.kind == 'xlstm':\n    y = {'transformer': 1}") == [1, 2]
    files = [path for path in PACKAGE.rglob("*.py") if "models" not in path.relative_to(PACKAGE).parts]
    files.remove(PACKAGE / "_moved.py")  # names of modules
    assert len(files) > 25
    found = {str(path.relative_to(PACKAGE)): lines for path in files if (lines := names_of_kinds(path.read_text()))}
    assert found == {}
