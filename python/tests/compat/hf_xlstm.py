"""Run by test_compat_transformers.py in a process of its own: the Hugging Face xLSTM before and after patch().

usage: hf_xlstm.py with|without       with or without the package xlstm, which transformers looks for when imported
"""

import sys

import torch
import transformers.utils

if sys.argv[1] == "without":
    transformers.utils.is_xlstm_available = lambda: False

from transformers.models.xlstm.configuration_xlstm import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import external_xlstm, xLSTMForCausalLM

import tfla.compat.transformers as compat
from tfla.reference import relative_error

assert external_xlstm == (sys.argv[1] == "with")
VOCABULARY = 40
PROMPT = torch.randint(3, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(1))


def make_model(**options):
    torch.manual_seed(0)
    config = xLSTMConfig(
        vocab_size=VOCABULARY, hidden_size=128, embedding_dim=128, num_hidden_layers=2, num_blocks=2, num_heads=2,
        chunk_size=16, **options,
    )  # fmt: skip
    model = xLSTMForCausalLM(config)
    # Its own initialisation closes half of every feed-forward network and nearly all input gates.
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_preact.bias"):
                parameter.copy_(torch.tensor([3.0, 5.0] if "fgate" in name else [-1.0, 0.5]))
            elif parameter.dim() == 2:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def generated(model):
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 1}
    return model.eval().generate(PROMPT, **options)


def check_inference(**options):
    """Forward and generate as without the patch: the same logits to rounding, the same tokens."""
    compat.unpatch()
    native = make_model(**options).eval()
    with torch.no_grad():
        expected = native(PROMPT, use_cache=True)
        tokens = generated(native)
        compat.patch()
        model = make_model(**options).eval()
        assert isinstance(model.backbone.blocks[0].mlstm_layer.mlstm_backend, compat.Backend)
        actual = model(PROMPT, use_cache=True)
        assert torch.equal(generated(model), tokens)
        compat.patch(native)  # a model that exists already
        assert torch.equal(generated(native), tokens)
    assert relative_error(actual.logits, expected.logits) < 1e-5
    for layer, state in expected.cache_params.rnn_state.items():
        for x, y in zip(actual.cache_params.rnn_state[layer], state, strict=True):
            assert relative_error(x, y) < 1e-5


def check_training(tokens, **options):
    compat.patch()
    model = make_model(**options).train()
    data = torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(8):
        loss = model(data, labels=data).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
    assert losses[-1] < 0.8 * losses[0], losses
    return losses


def check_native_cannot_train():
    """What the patch is for. Where this fails, transformers has been mended."""
    compat.unpatch()
    model = make_model().train()
    data = PROMPT[:, :32]
    try:
        model(data, labels=data).loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("transformers trains its xLSTM by itself")


def check_gradients():
    """Against the model without a cache, which PyTorch can differentiate as it is."""
    grads = []
    for patched in (True, False):
        (compat.patch if patched else compat.unpatch)()
        model = make_model(mode="train").train()
        data = PROMPT[:, :32]
        model(data, labels=data, use_cache=patched).loss.backward()
        grads.append({name: x.grad for name, x in model.named_parameters()})
    for name, expected in grads[1].items():
        assert relative_error(grads[0][name], expected) < 1e-3, (name, relative_error(grads[0][name], expected))


def check_chained_calls():
    """A cache handed from one call to the next carries gradients from the second to the first."""
    compat.patch()
    model = make_model().train()
    whole = model(PROMPT, use_cache=False).logits
    first = model(PROMPT[:, :20], use_cache=True)
    second = model(PROMPT[:, 20:], cache_params=first.cache_params, use_cache=True)
    assert relative_error(torch.cat([first.logits, second.logits], 1), whole) < 1e-5
    embeddings = model.backbone.embeddings.weight
    (expected,) = torch.autograd.grad(whole[:, -1].square().sum(), embeddings)
    (actual,) = torch.autograd.grad(second.logits[:, -1].square().sum(), embeddings)
    assert relative_error(actual, expected) < 1e-4


check_inference()
check_native_cannot_train()
check_gradients()
check_chained_calls()
print("losses", *(check_training(tokens) for tokens in (37, 64)))
check_training(37, mode="train")
check_training(37, mode="train", return_last_states=False)
if external_xlstm:
    check_training(21, chunkwise_kernel="chunkwise--triton_xl_chunk", step_kernel="triton")  # as in published configs
    check_training(21, chunkwise_kernel="chunkwise--triton_xl_chunk_siging")
try:
    compat.patch(torch.nn.Linear(2, 2))
except ValueError as error:
    assert "without xLSTM blocks" in str(error)
else:
    raise AssertionError("a model without xLSTM blocks was not refused")
