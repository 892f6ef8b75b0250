"""The decoder against the model that it is made of, and generation on it: tokens, states, stop tokens, seeds."""

import pytest
import torch

from lm_inputs import EOD, PROMPTS, greedy
from lm_third_model import Averages
from test_lm_model import make_model
from tfla.lm import Decoder
from tfla.lm.generate import Sampling, Session, complete, generate
from tfla.lm.models import KINDS
from tfla.lm.models.xlstm_decoder import MLSTMDecoder
from tfla.nn import Linear
from tfla.reference import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = Sampling(temperature=0)
MODELS = {
    "xlstm": {},
    "sigmoid": {"gate": "sigmoid"},
    "rms": {"cell_norm": "rms", "norm_eps": 0.1, "cell_norm_eps": 0.2, "eps": 0.3},
    "caps": {"gate_soft_cap": 2.0, "logit_soft_cap": 3.0},
    "no caps": {"gate_soft_cap": None, "logit_soft_cap": None},
    "factors": {"qk_factor": 0.75, "v_factor": 1.5, "heads": 4, "ffn_dim": 50},
    "deltanet": {"kind": "deltanet"},
    "average": {"kind": "average"},
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(KINDS, "average", Averages())


def packed(prompts):
    """Tokens end to end and the boundaries of prompts."""
    bounds = torch.tensor([0, *map(len, prompts)]).cumsum(0)
    return torch.tensor([token for prompt in prompts for token in prompt]), bounds.int()


def last_logits(model, texts):
    with torch.no_grad():
        return torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])


@torch.no_grad()
def decoded(model, prompts, more):
    """Logits after the prompts and after each token (B) of `more`, by a decoder."""
    decoder = Decoder(model)
    logits, states = decoder.prefill(*packed(prompts))
    return torch.stack([logits, *(decoder.decode(tokens, states) for tokens in more)])


MORE = torch.randint(0, EOD, (5, len(PROMPTS)), generator=torch.Generator().manual_seed(2))
TEXTS = [[p + MORE[:t, b].tolist() for b, p in enumerate(PROMPTS)] for t in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_decoder_is_the_model_over_the_whole_sequence(changes, dtype):
    model = make_model(dtype, **changes)
    if dtype == torch.float64:
        model = model.double()
    expected = torch.stack([last_logits(model, texts) for texts in TEXTS])
    assert relative_error(decoded(model, PROMPTS, MORE), expected) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_in_bfloat16_it_is_as_near_to_float64_as_the_model():
    exact = make_model(torch.float64).double()
    expected = torch.stack([last_logits(exact, texts) for texts in TEXTS])
    model = make_model(torch.bfloat16)
    of_model = relative_error(torch.stack([last_logits(model, texts) for texts in TEXTS]), expected)
    # One rounding more or less in every norm and sum; another dtype of gates or norms would be far off.
    assert relative_error(decoded(model, PROMPTS, MORE), expected) < 1.25 * of_model


def test_weights_are_cast_once_and_the_model_stays():
    model = make_model(torch.bfloat16)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    decoder = Decoder(model)
    mixer, ffn = decoder.mixers[0], decoder.ffns[0]
    matrices = (decoder.embedding, decoder.head, mixer.joined, mixer.out, ffn.gate_up, ffn.down)
    assert {x.dtype for x in (*matrices, mixer.norm, mixer.cell_norm, decoder.norm)} == {torch.bfloat16}
    assert mixer.bias.dtype == torch.float32  # the larger part of gates
    assert not any(x.requires_grad for x in (*matrices, mixer.bias))
    assert all(torch.equal(x, before[name]) and x.dtype == torch.float32 for name, x in model.state_dict().items())
    # What needs no change is not copied.
    same = make_model()
    assert Decoder(same).ffns[0].down.data_ptr() == same.blocks[0].ffn.down.weight.data_ptr()
    assert Decoder(same).embedding.data_ptr() == same.embedding.weight.data_ptr()
    assert Decoder(same, dtype=torch.bfloat16).head.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["xlstm", "deltanet"])
def test_states_are_updated_in_place_and_in_their_dtype(kind):
    decoder = Decoder(make_model(torch.bfloat16, kind=kind))
    with torch.no_grad():
        _, states = decoder.prefill(*packed(PROMPTS))
        before = [[(x.data_ptr(), x.clone()) for x in state] for state in states]
        decoder.decode(torch.tensor([1, 2, 3, 4]), states)
    for state, old in zip(states, before, strict=True):
        assert {x.dtype for x in state} == {torch.float32}
        assert [x.data_ptr() for x in state] == [place for place, _ in old]
        assert not torch.equal(state[0], old[0][1])
    fresh = decoder.new_states(4)
    assert [[x.shape for x in state] for state in fresh] == [[x.shape for x in state] for state in states]


def test_a_layer_that_was_replaced_is_called():
    """Adapters and hooks are more than their weights."""

    class Adapted(Linear):
        def forward(self, x):
            return super().forward(x) + 0.5 * x.flip(-1)

    model = make_model()
    model.blocks[0].mix.q.register_forward_hook(lambda module, args, y: 2 * y)
    adapted = Adapted(32, 32, bias=False)
    adapted.load_state_dict(model.blocks[1].mix.out.state_dict())
    model.blocks[1].mix.out = adapted
    model.blocks[1].ffn.up.register_forward_hook(lambda module, args, y: y + 1)
    expected = torch.stack([last_logits(model, texts) for texts in TEXTS])
    assert relative_error(decoded(model, PROMPTS, MORE), expected) < 1e-5
    assert not any(isinstance(mixer, MLSTMDecoder) for mixer in Decoder(model).mixers)


class Louder(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGED = {
    "embedding": lambda model: model.embedding.register_forward_hook(lambda module, args, y: 2 * y),
    "norm": lambda model: setattr(model, "norm", torch.nn.LayerNorm(32)),
    "head": lambda model: setattr(model, "head", Louder(32, model.config.vocab, bias=False)),
    "blocks.1": lambda model: model.blocks[1].register_forward_pre_hook(lambda module, args: None),
    "blocks.0.norm_mix": lambda model: setattr(model.blocks[0].norm_mix, "forward", lambda x: x),
    "blocks.1.norm_ffn": lambda model: model.blocks[1].norm_ffn.register_forward_hook(lambda module, args, y: 2 * y),
}


@pytest.mark.parametrize(("name", "change"), CHANGED.items(), ids=CHANGED)
def test_other_parts_that_were_replaced_are_refused(name, change):
    """Rather than left out without a word."""
    model = make_model()
    change(model)
    with pytest.raises(ValueError, match=f"^tfla: model.{name} was replaced, or has hooks"):
        Session(model, PROMPTS)


def test_a_layer_with_another_forward_is_called():
    model = make_model()
    inner = model.blocks[0].mix.out.forward
    model.blocks[0].mix.out.forward = lambda x: 2 * inner(x)
    expected = torch.stack([last_logits(model, texts) for texts in TEXTS])
    assert relative_error(decoded(model, PROMPTS, MORE), expected) < 1e-5


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "drawn"])
def test_logits_that_become_nan_end_the_text_with_a_sentence(sampling):
    session = Session(make_model(), PROMPTS)
    rows = generate(session, 5, sampling)
    next(rows)
    session.logits = session.logits.clone()
    session.logits[2] = float("nan")
    with pytest.raises(ValueError, match="^tfla: logits of the model are not numbers"):
        next(rows)


def test_autocast_changes_nothing():
    model = make_model()
    expected = decoded(model, PROMPTS, MORE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(decoded(model, PROMPTS, MORE), expected)


@pytest.mark.parametrize("changes", [MODELS["xlstm"], MODELS["deltanet"]], ids=str)
def test_a_sequence_does_not_depend_on_others_in_its_batch(changes):
    decoder = Decoder(make_model(**changes))
    alone = [complete(decoder, [prompt], 15, GREEDY)[0] for prompt in PROMPTS]
    assert complete(decoder, PROMPTS, 15, GREEDY) == alone
    assert complete(decoder, PROMPTS[::-1], 15, GREEDY) == alone[::-1]


def test_one_decoder_serves_many_sessions(tmp_path):
    model = make_model()
    decoder = Decoder(model)
    expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
    first, second = Session(decoder, PROMPTS[:2]), Session(decoder, PROMPTS[2:])
    rows = list(zip(generate(first, 8, GREEDY), generate(second, 8, GREEDY), strict=True))  # in turn
    assert [list(row) for row in zip(*(a + b for a, b in rows), strict=True)] == expected
    first.save(tmp_path / "s.pt")
    assert torch.equal(Session.load(decoder, tmp_path / "s.pt").logits, first.logits)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_the_state_is_after_the_tokens_that_were_taken(taken):
    """Who stops early goes on from there: no step is ahead of the tokens."""
    model = make_model()
    session = Session(model, PROMPTS)
    rows = generate(session, 10, GREEDY)
    found = [next(rows) for _ in range(taken)]
    rows.close()
    texts = [prompt + [row[b] for row in found] for b, prompt in enumerate(PROMPTS)]
    assert relative_error(session.logits, last_logits(model, texts)) < 1e-5


def test_stop_tokens_lose_and_add_nothing():
    model = make_model()
    whole = complete(model, PROMPTS, 20, GREEDY)
    for stop in ({whole[0][0]}, {whole[1][3]}, {whole[0][7], whole[2][2]}, {row[9] for row in whole}):
        ends = [next((t for t, token in enumerate(row) if token in stop), 20) for row in whole]
        session = Session(model, PROMPTS)
        rows = list(generate(session, 20, GREEDY, stop=stop))
        assert len(rows) == min(20, max(ends))  # a row in which all have ended is not given
        for b, end in enumerate(ends):
            assert [row[b] for row in rows] == whole[b][: min(end, len(rows))] + [None] * (len(rows) - end)
        # All have read the stop token of the last to end, and no more.
        read = min(20, max(ends) + 1)
        texts = [prompt + row[:read] for prompt, row in zip(PROMPTS, whole, strict=True)]
        assert relative_error(session.logits, last_logits(model, texts)) < 1e-5


def test_tokens_are_drawn_as_multinomial_draws():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(3))
    expected = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(4))[:, 0]
    assert torch.equal(Sampling().choose(logits, torch.Generator().manual_seed(4)), expected)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=20), Sampling(1.3, top_p=0.9)], ids=str)
def test_sampling_is_reproducible(sampling):
    decoder = Decoder(make_model())
    texts = [complete(decoder, PROMPTS, 12, sampling, seed=seed, allowed=300) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_sampled_tokens_are_those_of_the_whole_sequence():
    model, generator = make_model(), torch.Generator().manual_seed(7)
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(10):
        tokens = Sampling(0.8).choose(last_logits(model, texts)[:, :300], generator)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
    expected = [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
    assert complete(model, PROMPTS, 10, Sampling(0.8), seed=7, allowed=300) == expected


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Decoder(make_model(kind="transformer")), "kind is 'transformer', which keeps no state; only xlstm or"),
        (
            lambda: Decoder(make_model(kind="deltanet"), device="cuda"),
            "device is 'cuda' for kind 'deltanet', which runs on 'cpu' alone",
        ),
    ],
    ids=["transformer", "deltanet on a GPU"],
)
def test_decoder_refuses(call, sentence):
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        call()


def test_shards_are_refused(monkeypatch):
    model = make_model()
    monkeypatch.setattr(model.head.weight, "full_tensor", None, raising=False)
    with pytest.raises(ValueError, match="^tfla: model has weights that are shards of several processes"):
        Decoder(model)
