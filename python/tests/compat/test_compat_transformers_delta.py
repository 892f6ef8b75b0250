"""tfla.compat.transformers on models with the gated delta rule, against the same models without the patch."""

import importlib

import pytest
import torch
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

import tfla
import tfla.compat.transformers as compat
from tfla.compat import transformers_delta
from tfla.reference import relative_error

pytestmark = pytest.mark.usefixtures("one_thread", "unpatched")
VOCABULARY = 40
# Two key heads for four value heads; head dimensions that differ; a layer of each kind; no experts, whose choice of
# experts is not continuous.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
# Both sides compute the layer in float32, in sums of some hundred terms and in another order: a few roundings of 6e-8,
# which the layers behind it multiply by less than ten.
ROUNDING = 1e-5
PROMPT = torch.randint(3, VOCABULARY, (2, 77), generator=torch.Generator().manual_seed(1))  # more than a chunk of 64


@pytest.fixture
def unpatched(monkeypatch):  # whose functions are taken back after this one's
    compat.unpatch()  # examples of pages patch too
    yield
    compat.unpatch()


def lively(model: torch.nn.Module) -> torch.nn.Module:
    """Weights with which the layer matters, and gates that are neither open nor closed."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith(("A_log", "dt_bias")):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 1.5)
    return model


def make_model(dtype=torch.float32, cls=Qwen3NextForCausalLM, config=Qwen3NextConfig, **changes):
    if cls is Qwen3NextForCausalLM:
        changes = {"mlp_only_layers": [0, 1], "num_experts": 2, "num_experts_per_tok": 1, **changes}
    return lively(cls(config(**{**SIZES, **changes}))).to(dtype).eval()


def calls(monkeypatch) -> list[int]:
    """The lengths of sequences that reach tfla's operators."""
    seen = []

    def counted(operator):
        return lambda q, *x, **named: seen.append((operator.__name__, q.shape[1])) or operator(q, *x, **named)

    for operator in (tfla.delta_rule, tfla.delta_rule_step):
        monkeypatch.setattr(tfla, operator.__name__, counted(operator))
    return seen


def generated(model, **options):
    named = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, "use_cache": True, **options}
    return model.generate(PROMPT, **named)


@pytest.mark.parametrize("whole", [True, False], ids=["patch()", "patch(model)"])
def test_logits_and_states(whole, monkeypatch):
    model = make_model()
    with torch.no_grad():
        expected = model(PROMPT, use_cache=True)
        seen = calls(monkeypatch)
        compat.patch(None if whole else model)
        actual = model(PROMPT, use_cache=True)
        assert seen == [("delta_rule", 77)]
        assert relative_error(actual.logits, expected.logits) < ROUNDING
        states = [x.past_key_values.layers[0].recurrent_states[0] for x in (actual, expected)]
        assert states[0].shape == (2, 4, 8, 12) and relative_error(*states) < ROUNDING
        compat.unpatch()
        assert torch.equal(model(PROMPT).logits, expected.logits) and len(seen) == 1


def test_gradients():
    model, grads = make_model().train(), []
    for patched in (False, True):
        if patched:
            compat.patch(model)
        model.zero_grad()
        model(PROMPT, labels=PROMPT).loss.backward()
        grads.append({name: x.grad.clone() for name, x in model.named_parameters()})
    for name, expected in grads[0].items():
        # Gradients are sums over all tokens of both rows, of both signs: ten times what outputs lose.
        assert relative_error(grads[1][name], expected) < 10 * ROUNDING, name


@pytest.mark.parametrize("beams", [1, 3])
def test_generate(beams, monkeypatch):
    model = make_model()
    expected = generated(model, num_beams=beams)
    seen = calls(monkeypatch)
    compat.patch(model)
    assert torch.equal(generated(model, num_beams=beams), expected)
    assert (
        seen == [("delta_rule", 77)] + [("delta_rule_step", 1)] * 8
    )  # the prompt, then one token after another from its state
    assert expected[:, 77:].unique().numel() > 4


def test_decoding_goes_on_from_the_cache():
    """Logits, not only the likeliest tokens: a prompt in two parts and single tokens, against the whole sequence."""
    model = make_model()
    with torch.no_grad():
        whole = model(PROMPT).logits
        compat.patch(model)
        first = model(PROMPT[:, :40], use_cache=True)
        parts, cache = [first.logits], first.past_key_values
        for part in (PROMPT[:, 40:70], *PROMPT[:, 70:].split(1, dim=1)):
            parts.append(model(part, past_key_values=cache, use_cache=True).logits)
    assert relative_error(torch.cat(parts, 1), whole) < ROUNDING


def test_a_cache_carries_gradients():
    """From the second call to the first, though the model copies the last state over the one between them."""
    model = make_model().train()
    compat.patch(model)
    whole = model(PROMPT).logits
    first = model(PROMPT[:, :40], use_cache=True)
    second = model(PROMPT[:, 40:], past_key_values=first.past_key_values, use_cache=True)
    embeddings = model.model.embed_tokens.weight
    (expected,) = torch.autograd.grad(whole[:, -1].square().sum(), embeddings)
    (actual,) = torch.autograd.grad(second.logits[:, -1].square().sum(), embeddings)
    assert relative_error(actual, expected) < 10 * ROUNDING


def test_padding_on_the_left():
    model = make_model()
    mask = torch.ones_like(PROMPT)
    mask[0, :9] = 0
    with torch.no_grad():
        expected = model(PROMPT, attention_mask=mask).logits
        compat.patch(model)
        assert relative_error(model(PROMPT, attention_mask=mask).logits, expected) < ROUNDING


def test_bfloat16():
    """Both read the same bfloat16 values and compute in float32: at most the last digit of an output differs."""
    model = make_model(torch.bfloat16)
    with torch.no_grad():
        expected = model(PROMPT).logits
        compat.patch(model)
        actual = model(PROMPT).logits
    assert actual.dtype == torch.bfloat16 and relative_error(actual, expected) < 2.0**-8


def test_float64_is_computed_in_float64():
    """The float32 of the model without the patch is what differs."""
    model = make_model(torch.float64)
    with torch.no_grad():
        expected = model(PROMPT).logits
        compat.patch(model)
        actual = model(PROMPT).logits
        parts = torch.cat([model(PROMPT[:, :n]).logits[:, -1:] for n in (1, 64, 77)], 1)
    assert 1e-12 < relative_error(actual, expected) < ROUNDING
    assert relative_error(parts, actual[:, [0, 63, 76]]) < 1e-12


@pytest.mark.parametrize("family", transformers_delta.FAMILIES)
def test_layers_of_every_family(family, monkeypatch):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (cls,) = [x for name, x in vars(module).items() if name.endswith("GatedDeltaNet")]
    (config,) = [x for name, x in vars(module).items() if name.endswith(("TextConfig", "NextConfig", "HybridConfig"))]
    layer = lively(cls(config(**SIZES), 0))
    x = torch.randn(2, 70, 32)
    with torch.no_grad():
        expected = layer(x)
        seen = calls(monkeypatch)
        compat.patch(layer)
        assert relative_error(layer(x), expected) < ROUNDING and seen == [("delta_rule", 70)]


@pytest.mark.parametrize("name", ["Qwen3_5", "OlmoHybrid"])
def test_relatives_generate(name):
    module = modeling_qwen3_5 if name == "Qwen3_5" else modeling_olmo_hybrid
    config = module.Qwen3_5TextConfig if name == "Qwen3_5" else module.OlmoHybridConfig
    model = make_model(cls=getattr(module, f"{name}ForCausalLM"), config=config)
    expected = generated(model)
    compat.patch()
    assert torch.equal(generated(model), expected)


def test_elsewhere_than_on_the_cpu_models_keep_what_they_have(monkeypatch):
    original = []
    monkeypatch.setattr(
        modeling_qwen3_next, "torch_chunk_gated_delta_rule", lambda *x, **named: original.append(named) or ("o", None)
    )
    compat.patch()
    q = torch.zeros(1, 3, 2, 4, device="meta")
    function = modeling_qwen3_next.torch_chunk_gated_delta_rule
    assert function(q, q, q, g=q[..., 0], beta=q[..., 0], cu_seqlens=None, chunk_size=32) == ("o", None)
    assert original[0]["chunk_size"] == 32 and original[0]["output_final_state"] is False


def test_refused():
    model = make_model()
    compat.patch(model)
    with pytest.raises(ValueError, match="^tfla: cu_seq_lens_q is given"), torch.no_grad():
        model(PROMPT[:1], cu_seq_lens_q=torch.tensor([0, 30, 77]))
    with pytest.raises(ValueError, match="^tfla: model is a Linear without .*, without the gated delta rule"):
        compat.patch(torch.nn.Linear(2, 2))


def test_patched_twice_is_patched_once(monkeypatch):
    before = modeling_qwen3_next.torch_chunk_gated_delta_rule
    compat.patch()
    compat.patch(make_model())
    compat.unpatch()
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is before
