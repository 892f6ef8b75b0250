"""tfla.compat.transformers on models with Mamba-2, against the same models without the patch."""

import pytest
import torch
import transformers
from transformers.models.mamba2 import modeling_mamba2

import tfla
import tfla.compat.transformers as compat
from tfla.compat import transformers_mamba2
from tfla.reference import relative_error

pytestmark = pytest.mark.usefixtures("one_thread", "unpatched")
VOCABULARY = 40
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16}
HYBRID = {**COMMON, **ATTENTION, **HEADS, "num_hidden_layers": 2}
# Eight heads of 8 with two groups and states of 12 in all of them, and where they have attention a layer of it; no
# experts, whose choice of experts is not continuous.
FAMILIES = {
    "mamba2": ("Mamba2", {**COMMON, "num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "chunk_size": 16,
                          "num_hidden_layers": 2, "time_step_limit": (0.05, 1.0)}),
    "bamba": ("Bamba", {**HYBRID, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {**HYBRID, "head_dim": 16, "mamba_d_ssm": 64, "mamba_rms_norm": False}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**HYBRID, "num_local_experts": 0, "shared_intermediate_size": 48,
                                              "layer_types": ["mamba", "attention"]}),
    "zamba2": ("Zamba2", {**COMMON, **ATTENTION, "num_hidden_layers": 2, "n_mamba_heads": 8, "mamba_ngroups": 2,
                          "mamba_d_state": 12, "chunk_size": 16, "layers_block_type": ["mamba", "hybrid"]}),
    "nemotron_h": ("NemotronH", {**COMMON, **ATTENTION, "head_dim": 16, "ssm_state_size": 12, "mamba_num_heads": 8,
                                 "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16,
                                 "layers_block_type": ["mamba", "attention", "mlp"]}),
}  # fmt: skip
# Both sides compute the layer in float32, in sums of some hundred terms and in another order: a few roundings of 6e-8,
# which the layers behind it multiply by less than ten.
ROUNDING = 1e-5
PROMPT = torch.randint(3, VOCABULARY, (2, 45), generator=torch.Generator().manual_seed(1))  # some chunks of 16


@pytest.fixture
def unpatched(monkeypatch):  # whose functions are taken back after this one's
    compat.unpatch()  # examples of pages patch too
    yield
    compat.unpatch()


def make_model(family="mamba2", dtype=torch.float32, **changes):
    """Weights with which the layer matters, and steps of moderate size."""
    name, sizes = FAMILIES[family]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**sizes, **changes}))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter_name.endswith(("A_log", "dt_bias")):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 1.5)
            elif parameter_name.endswith((".D", "mixer.norm.weight", "mamba.norm.weight")):
                parameter.copy_(1 + torch.rand(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def calls(monkeypatch) -> list[tuple[str, int]]:
    """The lengths of sequences that reach tfla's operators."""
    seen = []

    def counted(operator):
        return lambda x, *xs, **named: (
            seen.append((operator.__name__, x.shape[1] if x.dim() == 4 else 1)) or operator(x, *xs, **named)
        )

    for operator in (tfla.ssd, tfla.ssd_step):
        monkeypatch.setattr(tfla, operator.__name__, counted(operator))
    return seen


def generated(model, **options):
    named = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7, "use_cache": True, **options}
    return model.generate(PROMPT, **named)


@pytest.mark.parametrize("family", transformers_mamba2.FAMILIES)
def test_logits_of_every_family(family, monkeypatch):
    model = make_model(family)
    with torch.no_grad():
        expected = model(PROMPT, use_cache=False).logits
        seen = calls(monkeypatch)
        compat.patch(None if family == "mamba2" else model)
        assert relative_error(model(PROMPT, use_cache=False).logits, expected) < ROUNDING
        assert seen and set(seen) == {("ssd", 45)}
        compat.unpatch()
        count = len(seen)
        assert torch.equal(model(PROMPT, use_cache=False).logits, expected) and len(seen) == count


@pytest.mark.parametrize("family", transformers_mamba2.FAMILIES)
def test_generate(family, monkeypatch):
    model = make_model(family)
    expected = generated(model)
    seen = calls(monkeypatch)
    compat.patch(model)
    assert torch.equal(generated(model), expected)
    layers = seen.count(("ssd", 45))  # the prompt, then one token after another from its state
    assert layers and seen == [("ssd", 45)] * layers + [("ssd_step", 1)] * 6 * layers
    assert expected[:, 45:].unique().numel() > 2


def test_beams(monkeypatch):
    model = make_model()
    expected = generated(model, num_beams=3)
    compat.patch(model)
    assert torch.equal(generated(model, num_beams=3), expected)


@pytest.mark.parametrize("family", transformers_mamba2.FAMILIES)
def test_gradients(family):
    model, grads = make_model(family).train(), []
    for patched in (False, True):
        if patched:
            compat.patch(model)
        model.zero_grad()
        model(PROMPT, labels=PROMPT, use_cache=False).loss.backward()
        grads.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
    assert any(name.endswith("A_log") for name in grads[0])
    for name, expected in grads[0].items():
        # Gradients are sums over all tokens of both rows, of both signs: ten times what outputs lose.
        assert relative_error(grads[1][name], expected) < 10 * ROUNDING, name


def states(output):
    return [layer.recurrent_states[0] for layer in output.cache_params.layers if hasattr(layer, "recurrent_states")]


def test_states():
    model = make_model()
    with torch.no_grad():
        expected = states(model(PROMPT, use_cache=True))
        compat.patch(model)
        actual = states(model(PROMPT, use_cache=True))
    assert len(actual) == 2 and all(x.shape == (2, 8, 8, 12) for x in actual)
    assert all(relative_error(a, b) < ROUNDING for a, b in zip(actual, expected, strict=True))


# Without a limit, which transformers leaves out for single tokens.
ENDLESS = {"time_step_limit": (0.0, float("inf"))}


@pytest.mark.parametrize("gradients", [False, True], ids=["steps", "sequences of a token"])
def test_decoding_goes_on_from_the_cache(gradients):
    """Logits, not only the likeliest tokens: a prompt in two parts and single tokens, against the whole sequence."""
    model = make_model(**ENDLESS)
    with torch.set_grad_enabled(gradients):
        whole = model(PROMPT).logits
        compat.patch(model)
        first = model(PROMPT[:, :20], use_cache=True)
        parts, cache = [first.logits], first.cache_params
        for part in (PROMPT[:, 20:40], *PROMPT[:, 40:].split(1, dim=1)):
            parts.append(model(part, cache_params=cache, use_cache=True).logits)
    assert relative_error(torch.cat(parts, 1), whole) < ROUNDING


@pytest.mark.parametrize("first", [20, 44], ids=["the rest is a sequence", "the rest is a token"])
def test_a_cache_carries_gradients(first):
    """From the second call to the first, though the model copies the last state over the one between them."""
    model = make_model(**ENDLESS).train()
    compat.patch(model)
    weights = [model.backbone.embeddings.weight, model.backbone.layers[0].mixer.A_log]
    expected = torch.autograd.grad(model(PROMPT, use_cache=False).logits[:, -1].square().sum(), weights)
    before = model(PROMPT[:, :first], use_cache=True)
    after = model(PROMPT[:, first:], cache_params=before.cache_params, use_cache=True)
    actual = torch.autograd.grad(after.logits[:, -1].square().sum(), weights)
    assert all(relative_error(a, b) < 10 * ROUNDING for a, b in zip(actual, expected, strict=True))


def test_padding_on_the_left():
    model = make_model()
    mask = torch.ones_like(PROMPT)
    mask[0, :9] = 0
    with torch.no_grad():
        expected = model(PROMPT, attention_mask=mask).logits
        compat.patch(model)
        assert relative_error(model(PROMPT, attention_mask=mask).logits, expected) < ROUNDING


def test_bfloat16():
    """No farther from the same weights in float64 than without the patch."""
    model = make_model(dtype=torch.bfloat16)
    with torch.no_grad():
        theirs = model(PROMPT).logits
        compat.patch(model)
        ours = model(PROMPT).logits
        exact = model.double()(PROMPT).logits
    assert ours.dtype == theirs.dtype
    assert relative_error(ours, exact) < 1.2 * relative_error(theirs, exact) < 0.1


def test_float64_is_computed_in_float64():
    """The float32 of the model without the patch is what differs."""
    model = make_model(dtype=torch.float64)
    with torch.no_grad():
        expected = model(PROMPT).logits
        compat.patch(model)
        actual = model(PROMPT).logits
    assert 1e-12 < relative_error(actual, expected) < ROUNDING


def test_elsewhere_than_on_the_cpu_models_keep_what_they_have(monkeypatch):
    original = []
    for name in transformers_mamba2.LAYERS.substitutes:
        monkeypatch.setattr(modeling_mamba2, name, lambda *x, **named: original.append(named) or "y")
    compat.patch()
    x, B = torch.zeros(1, 3, 2, 4, device="meta"), torch.zeros(1, 3, 1, 5, device="meta")
    assert modeling_mamba2.mamba2_chunk_scan(x, x[..., 0], x[0, 0, :, 0], B, B, chunk_size=32, dt_softplus=True) == "y"
    assert original[0]["dt_softplus"] and original[0]["return_final_states"] is False
    step = modeling_mamba2.mamba2_selective_state_update
    assert step(x, x[:, 0], x[:, 0], x[0], B[:, 0], B[:, 0], z=None, dt_softplus=True) == "y" and len(original) == 2


def test_packed_sequences_stay_refused():
    """By transformers, whose convolution would mix them; behind it, by the function that is replaced."""
    compat.patch()
    x, B = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 1, 5)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        modeling_mamba2.mamba2_chunk_scan(x, x[..., 0], x[0, 0, :, 0], B, B, 32, seq_idx=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="can't keep packed sequences apart"), torch.no_grad():
        make_model().backbone.layers[0].mixer(torch.zeros(1, 3, 32), seq_idx=torch.zeros(1, 3))


def test_patched_twice_is_patched_once():
    before = modeling_mamba2.mamba2_chunk_scan
    compat.patch()
    compat.patch(make_model())
    compat.unpatch()
    assert modeling_mamba2.mamba2_chunk_scan is before
