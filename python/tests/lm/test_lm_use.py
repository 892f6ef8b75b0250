"""Evaluation, generation, conversion and the command line, on a model of random weights."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from lm_inputs import EOD, PROMPTS, greedy, make_data, small_model, write_texts
from tfla.lm import LanguageModel, convert
from tfla.lm.cli import main
from tfla.lm.data import Dataset
from tfla.lm.evaluate import evaluate, positions
from tfla.lm.generate import Sampling, Session, complete, generate
from tfla.reference import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
NATIVE = {
    "chunkwise_kernel_name": "chunkwise--native_autograd",
    "sequence_kernel_name": "native_sequence__native",
    "step_kernel_name": "native",
}


def make_model(**changes) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(small_model(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("lm"))


@pytest.mark.parametrize("kind", ["xlstm", "transformer", "deltanet"])
def test_evaluation_is_the_mean_over_documents(data, kind):
    model, rows = make_model(kind=kind), Dataset(data, "validation", 70)
    result = evaluate(model, rows, batch=3)
    total, count, by_position = 0.0, 0, {}
    with torch.no_grad():
        for row in range(rows.rows):
            targets = rows.stream(row * 70, min((row + 1) * 70, rows.tokens)).astype("int64")
            ends = [place + 1 for place, token in enumerate(targets) if token == EOD]
            for begin, end in zip([0, *ends], [*ends, len(targets)], strict=True):
                if begin == end:
                    continue
                target = torch.tensor(targets[begin:end])
                logits = model(torch.cat([torch.tensor([EOD]), target[:-1]])[None]).double()
                losses = F.cross_entropy(logits[0], target, reduction="none")
                total, count = total + losses.sum().item(), count + len(target)
                for place, loss in enumerate(losses.tolist()):
                    by_position.setdefault(int(math.log2(place + 1)), []).append(loss)
    assert result.tokens == count == rows.tokens
    assert result.loss == pytest.approx(total / count, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(
        total / math.log(2) / rows.meta["splits"]["validation"]["bytes"], rel=1e-5
    )
    assert [row["tokens"] for row in result.positions] == [len(by_position[j]) for j in sorted(by_position)]
    for row, j in zip(result.positions, sorted(by_position), strict=True):
        assert row["loss"] == pytest.approx(sum(by_position[j]) / len(by_position[j]), rel=1e-5)


def test_evaluation_is_the_same_for_every_chunk_size(data):
    rows = Dataset(data, "validation", 200)
    results = [evaluate(make_model(chunk_size=size), rows) for size in (None, 1, 16, 64, 1000)]
    for result in results[1:]:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)


def test_positions():
    starts = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    assert positions(starts).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_greedy_generation_is_the_whole_sequence(gate):
    model = make_model(gate=gate)
    expected = [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert complete(model, PROMPTS, 12, Sampling(temperature=0)) == expected
    assert [complete(model, [prompt], 12, Sampling(temperature=0))[0] for prompt in PROMPTS] == expected
    # Each stops at its own stop token, which is not part of the result.
    stop = expected[0][5]
    cut = [row[: row.index(stop)] if stop in row else row for row in expected]
    assert complete(model, PROMPTS, 12, Sampling(temperature=0), stop={stop}) == cut


def test_state_is_saved_and_reloaded(tmp_path):
    model = make_model()
    whole = complete(model, PROMPTS, 10, Sampling(temperature=0))
    session = Session(model, PROMPTS)
    first = [row for row in generate(session, 4, Sampling(temperature=0))]
    session.save(tmp_path / "session.pt")
    again = Session.load(make_model(), tmp_path / "session.pt")
    second = [row for row in generate(again, 6, Sampling(temperature=0))]
    assert [list(row) for row in zip(*first, *second, strict=True)] == whole
    more = [[10, 11, 12], [13], [14, 15], [16]]
    again.feed(more)
    texts = [[*prompt, *tokens, *extra] for prompt, tokens, extra in zip(PROMPTS, whole, more, strict=True)]
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])
    assert relative_error(again.logits, expected) < 1e-5
    with pytest.raises(ValueError, match="is of a model with gate 'exp'; this one has 'sigmoid'"):
        Session.load(make_model(gate="sigmoid"), tmp_path / "session.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "session.pt").read_bytes()[:1000])
    with pytest.raises(ValueError, match="cut.pt is not a saved session, or it was cut off"):
        Session.load(model, tmp_path / "cut.pt")
    with pytest.raises(ValueError, match="prompts has 1 texts"):
        again.feed([[1]])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}),
        (Sampling(top_k=2), {0: 0.625, 1: 0.375}),
        (Sampling(top_p=0.6), {0: 0.625, 1: 0.375}),
        (Sampling(top_p=0.5), {0: 1.0}),
        (Sampling(top_p=0.9, top_k=3), {0: 0.5 / 0.95, 1: 0.3 / 0.95, 2: 0.15 / 0.95}),
        (Sampling(temperature=0.5), {0: 0.25 / 0.365, 1: 0.09 / 0.365, 2: 0.0225 / 0.365, 3: 0.0025 / 0.365}),
        (Sampling(temperature=0), {0: 1.0}),
    ],
    ids=str,
)
def test_sampling(sampling, kept):
    draws = 20_000
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(draws, 4)
    tokens = sampling.choose(logits, torch.Generator().manual_seed(0))
    for token in range(4):
        p = kept.get(token, 0.0)
        # Five standard errors.
        assert (tokens == token).float().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / draws))


def test_same_seed_same_text_and_only_allowed_tokens():
    model = make_model()
    texts = [complete(model, PROMPTS, 20, Sampling(), seed=seed, allowed=40) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert max(token for text in texts for row in text for token in row) < 40


REFUSED = [
    (lambda: Sampling(temperature=-1), "temperature is -1"),
    (lambda: Sampling(top_k=0), "top_k is 0"),
    (lambda: Sampling(top_p=1.5), "top_p is 1.5"),
    (lambda: Session(make_model(), [[1], []]), "prompt 1 is empty"),
    (lambda: Session(make_model(), []), "the list of prompts is empty"),
    (
        lambda: Session(make_model(kind="transformer"), PROMPTS),
        "kind is 'transformer', which keeps no state; only xlstm or deltanet gen",
    ),
    (
        lambda: make_model(kind="transformer").prefill(torch.zeros(1, 3, dtype=torch.long)),
        "kind is 'transformer', which keeps no state; only xlstm or deltanet generates",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[row[1] for row in REFUSED])
def test_generation_refuses(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


EXPORTED = {
    "default": {},
    "another feed-forward width": {"ffn_dim": 100},
    "other factors": {"qk_factor": 0.75, "v_factor": 1.5, "norm_eps": 1e-3, "cell_norm_eps": 1e-3, "eps": 1e-4},
    "other caps": {"gate_soft_cap": 5.0, "logit_soft_cap": 4.0},
}


@pytest.mark.parametrize("changes", EXPORTED.values(), ids=EXPORTED.keys())
def test_published_package_loads_our_export(tmp_path, changes):
    from xlstm.xlstm_large.from_pretrained import load_from_pretrained

    model = make_model(**changes)
    convert.export(model, tmp_path / "out", "xlstm")
    theirs = load_from_pretrained(tmp_path / "out", **NATIVE).eval()
    tokens = torch.randint(0, 256, (2, 64))
    with torch.no_grad():
        logits, _ = theirs(tokens)
        assert relative_error(model(tokens), logits) < 1e-4
    assert theirs.generate(tokens, max_length=10)[0].tolist() == complete(model, tokens.tolist(), 10, Sampling(0.0))


@pytest.mark.parametrize("fused", [False, True])
def test_import_of_the_published_package(tmp_path, fused):
    from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig
    from xlstm.xlstm_large.utils import convert_single_weights_to_fused_weights

    torch.manual_seed(3)
    options = {"embedding_dim": 64, "num_heads": 4, "num_blocks": 3, "vocab_size": 90, "gate_soft_cap": 12.0}
    kernels = {name.removesuffix("_name"): value for name, value in NATIVE.items()}
    theirs = xLSTMLarge(xLSTMLargeConfig(**options, **kernels, mode="inference", return_last_states=True)).eval()
    weights = theirs.state_dict()
    tokens = torch.randint(0, 90, (2, 50))
    with torch.no_grad():
        expected, _ = theirs(tokens)
        if fused:
            weights = convert_single_weights_to_fused_weights(dict(weights))
            assert any("qkv_opreact" in key for key in weights)
        save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in options.items()))
        assert relative_error(convert.import_model(tmp_path)(tokens), expected) < 1e-4


def test_hugging_face_loads_our_export(tmp_path):
    from transformers import xLSTMConfig, xLSTMForCausalLM

    model = make_model(dim=128)  # transformers rounds head dimensions of its cache to 64
    convert.export(model, tmp_path / "out", "huggingface", eod=EOD)
    assert xLSTMConfig.from_pretrained(tmp_path / "out").eos_token_id == EOD
    theirs = xLSTMForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        assert relative_error(model(tokens), theirs(tokens).logits) < 1e-4
    theirs.save_pretrained(tmp_path / "back", max_shard_size="200KB")
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    back = convert.import_model(tmp_path / "back")
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("layout", ["xlstm", "huggingface"])
@pytest.mark.parametrize("changes", [{}, {"gate": "sigmoid", "normalizer": "max"}, {"ffn_dim": 77}], ids=str)
def test_round_trip(tmp_path, layout, changes):
    model, tokens = make_model(**changes), torch.randint(0, 256, (1, 30))
    convert.export(model, tmp_path / "out", layout)
    back = convert.import_model(tmp_path / "out")
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(tokens), back(tokens))
    keys = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert "backbone.blocks.1.mlstm_layer.igate_preact.bias" in keys and "lm_head.weight" in keys


NOT_EXPORTED = [
    ({"gate": "sigmoid"}, "normalizer is None, which the layout 'xlstm' cannot say"),
    ({"cell_norm": "rms"}, "cell_norm is 'rms'"),
    ({"cell_norm_eps": 1e-2}, "cell_norm_eps is 0.01"),
    ({"logit_soft_cap": None}, "logit_soft_cap is None"),
    ({"kind": "transformer"}, "kind is 'transformer'"),
]


@pytest.mark.parametrize(("changes", "sentence"), NOT_EXPORTED, ids=[row[1] for row in NOT_EXPORTED])
def test_export_refuses_what_cannot_be_said(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        convert.export(make_model(**changes), tmp_path / "out", "xlstm")
    assert not (tmp_path / "out").exists()


def drop(weights):
    del weights["backbone.blocks.1.ffn.proj_down.weight"]


def add(weights):
    weights["backbone.blocks.0.conv.weight"] = torch.zeros(1)


def reshape(weights):
    weights["lm_head.weight"] = weights["lm_head.weight"][:3].clone()


def rename(weights):
    weights["model.embed.weight"] = weights.pop("embedding.weight")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (drop, "has no weight backbone.blocks.1.ffn.proj_down.weight"),
        (add, "has a weight backbone.blocks.0.conv.weight that"),
        (reshape, r"lm_head.weight of .* has shape \(3, 32\); it must be \(320, 32\)"),
        (rename, "has no weight embedding.weight; it is not an xLSTM"),
    ],
)
def test_import_refuses_other_weights(tmp_path, damage, sentence):
    convert.export(make_model(), tmp_path / "out", "xlstm")
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    damage(weights)
    save_file(weights, file)
    with pytest.raises(ValueError, match=sentence):
        convert.import_model(tmp_path / "out")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match="model.safetensors is not safetensors, or it was cut off"):
        convert.import_model(tmp_path / "out")


def test_command_line(tmp_path, capsys, monkeypatch):
    """From text to text, each command by its own name."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts.jsonl")
    assert main(["prepare", "texts.jsonl", "--out", "data", "--train-tokenizer", "300", "--validation", "0.2"]) == 0
    assert "train      " in capsys.readouterr().out
    train = "--layers 1 --dim 32 --steps 4 --warmup 1 --cooldown 1 --context 32 --batch 2 --no-tensorboard --device cpu"
    fields = "--input-gate-bias -5 --betas 0.9 0.9 --train-input-gate --chunk-size none"
    command = ["train", "--data", "data", "--out", "run", *train.split(), *fields.split()]
    assert main([*command, "--stop-after", "2"]) == 0
    assert "stopped; the same command goes on" in capsys.readouterr().out
    assert main(command) == 0 and "step 4 of 4: finished" in capsys.readouterr().out
    assert main(["eval", "run", "--json", "eval.json", "--chunk-size", "16", "--device", "cpu"]) == 0
    result = json.loads((tmp_path / "eval.json").read_text())
    assert f"perplexity {result['perplexity']:.4f}" in capsys.readouterr().out
    sample = ["--max-tokens", "5", "--seed", "1", "--device", "cpu"]
    assert main(["generate", "run", "the state", *sample, "--save-state", "s.pt"]) == 0
    assert capsys.readouterr().out.startswith("the state")
    assert main(["generate", "run", "--state", "s.pt", *sample]) == 0
    assert main(["generate", "run", "the", "a matrix", *sample]) == 0
    assert capsys.readouterr().out.count("--- ") == 2
    assert main(["export", "run", "--layout", "huggingface", "--out", "hf"]) == 0
    assert main(["import", "hf", "--out", "back", "--tokenizer", "hf/tokenizer.json"]) == 0
    assert main(["generate", "back", "the state", *sample]) == 0
    capsys.readouterr()
    assert main(["eval", "back", "--data", "data", "--context", "32", "--json", "back.json", "--device", "cpu"]) == 0
    assert json.loads((tmp_path / "back.json").read_text())["loss"] == pytest.approx(result["loss"], rel=1e-5)
    for bad, sentence in {
        ("eval", "nowhere"): "tfla: nowhere holds no checkpoint",
        ("train", "--out", "new"): "tfla: data is not given",
        ("train", "--out", "new", "--data", "data", "--preset", "2b"): "tfla: preset is '2b'",
        ("train", "--out", "run", "--lr", "1"): "was trained with lr",
        ("export", "run", "--layout", "xlstm", "--out", "hf"): "tfla: hf exists",
    }.items():
        assert main(list(bad)) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "prepare", "train", "eval", "generate", "export", "import", "bench"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*filter(None, [command]), "--help"])
    assert end.value.code == 0
    assert f"examples:\n  python -m tfla.lm {command}" in capsys.readouterr().out


def test_bench_measures_all_our_models(capsys, tmp_path):
    options = "--device cpu --sizes tiny --layers 1 --vocab 512 --context 128 --batch 1 --steps 1 --no-compile"
    assert main(["bench", *options.split(), "--json", str(tmp_path / "bench.json")]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert [row["model"] for row in rows] == ["exp", "sigmoid", "transformer", "deltanet"]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(128e3 / row["milliseconds"], rel=1e-6)
        assert row["loss"] == pytest.approx(math.log(512), rel=0.1)  # there is nothing to learn of random tokens
    assert capsys.readouterr().out.count("| tiny |") == 4
