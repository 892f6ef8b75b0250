"""tfla.compat.mlstm_kernels against the published package's own kernels, on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from mlstm_kernels.torch import get_mlstm_kernel, get_mlstm_sequence_kernel, get_mlstm_step_kernel
from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig
from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

import tfla.compat.mlstm_kernels as compat
from inputs import make_inputs, make_state
from tfla.reference import relative_error

compat.register()

B, NH, DQK, DHV = 2, 3, 16, 24
NATIVE = {
    "chunkwise_kernel": "chunkwise--native_autograd",
    "sequence_kernel": "native_sequence__native",
    "step_kernel": "native",
}
# Two float32 computations of the same numbers, one of them token by token or with float32 sums of log f.
ROUNDING = 1e-5
GRADIENT_ROUNDING = 1e-4


def head_first(tokens, **kwargs):
    return make_inputs(B, tokens, NH, DQK, DHV, **kwargs).map(lambda x: x.transpose(1, 2).contiguous())


def states(dtype=torch.float32):
    C, n, m = make_state(B, NH, DQK, DHV, dtype)
    return C, n, m.unsqueeze(-1)


def backend(**options):
    return mLSTMBackend(mLSTMBackendConfig(**options))


def normed_loss(h, target):
    """Through a norm layer over each head, under which the gradient of the denominator cancels."""
    return (F.layer_norm(h, h.shape[-1:], eps=0.0) * target).sum()


def train(kernel, inputs, target, initial=None, **options):
    leaves = inputs.leaves()
    initial = initial or (None, None, None)
    h = backend(chunkwise_kernel=kernel, return_last_states=False, **options)(*leaves, *initial)
    normed_loss(h, target).backward()
    return h, [x.grad for x in leaves]


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        ("chunkwise--tfla", "chunkwise--native_autograd", {}),
        ("chunkwise--tfla", "chunkwise--native_custbw", {}),
        ("parallel--tfla", "parallel--native_stablef_autograd", {}),
        ("chunkwise--tfla_siging", "parallel--native_siging_autograd", {}),
        ("chunkwise--tfla_siging", "parallel--native_siging_autograd", {"normalize_siging": False}),
        ("chunkwise--tfla_siging_unnormalized", "parallel--native_siging_autograd", {"normalize_siging": False}),
        ("parallel--tfla_siging", "parallel--native_siging_custbw", {}),
        ("parallel--tfla_siging", "parallel--native_siging_custbw", {"normalize_siging": False}),
    ],
)
@pytest.mark.parametrize("mode", ["train", "train_with_padding"])
def test_backend_trains_alike(ours, theirs, options, mode):
    tokens = 128 if mode == "train" else 100
    inputs = head_first(tokens)
    target = torch.randn(B, NH, tokens, DHV, generator=torch.Generator().manual_seed(1))
    h, grads = train(ours, inputs, target, mode=mode, **options)
    expected, expected_grads = train(theirs, inputs, target, mode=mode, **options)
    assert relative_error(h, expected) < ROUNDING
    for name, x, y in zip("qkvif", grads, expected_grads, strict=True):
        assert relative_error(x, y) < GRADIENT_ROUNDING, name


def test_backend_trains_alike_from_a_state():
    inputs, target = head_first(128), torch.randn(B, NH, 128, DHV, generator=torch.Generator().manual_seed(1))
    h, grads = train("chunkwise--tfla", inputs, target, states())
    expected, expected_grads = train("chunkwise--native_autograd", inputs, target, states())
    assert relative_error(h, expected) < ROUNDING
    for name, x, y in zip("qkvif", grads, expected_grads, strict=True):
        assert relative_error(x, y) < GRADIENT_ROUNDING, name


@pytest.mark.parametrize("tokens", [1, 2, 63, 100])
def test_any_length_trains(tokens):
    """Their chunkwise kernels refuse these lengths; a padded call of theirs is what is left to compare with."""
    inputs, target = head_first(tokens), torch.randn(B, NH, tokens, DHV, generator=torch.Generator().manual_seed(1))
    h, grads = train("chunkwise--tfla", inputs, target)
    expected, expected_grads = train("chunkwise--native_autograd", inputs, target, mode="train_with_padding")
    assert relative_error(h, expected) < ROUNDING
    # Behind a norm layer one token's output does not depend on its scale, so of one token only v has a gradient.
    for name, x, y in zip("qkvif", grads, expected_grads, strict=True):
        assert x.isfinite().all()
        if tokens > 1 or name == "v":
            assert relative_error(x, y) < GRADIENT_ROUNDING, name


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [2, 17, 64, 100])
def test_prefill_and_decoding_alike(tokens, state_dtype):
    """Prefill of any length and then single tokens, each package carrying its own state; the states agree too."""
    inputs = head_first(tokens + 3)
    results = []
    for names in (compat.kernel_names(), NATIVE):
        run = backend(mode="inference", inference_state_dtype=state_dtype, **names)
        with torch.no_grad():
            h, state = run(*inputs.map(lambda x: x[:, :, :tokens]))
            rows = [h]
            for t in range(tokens, tokens + 3):
                h, state = run(*inputs.map(lambda x, t=t: x[:, :, t : t + 1]), *state)
                rows.append(h)
        results.append((torch.cat(rows, 2), state))
    (h, state), (expected, expected_state) = results
    # States kept in bfloat16 are rounded by 2^-9 after every token, theirs and ours at other digits.
    bound = ROUNDING if state_dtype == "float32" else 2e-2
    assert relative_error(h, expected) < bound
    for x, y in zip(state, expected_state, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert relative_error(x, y) < bound


@pytest.mark.parametrize(("normalize", "suffix"), [(True, ""), (False, "_unnormalized")])
def test_sigmoid_prefill_and_decoding(normalize, suffix):
    """What mlstm_kernels cannot do: its sigmoid gate has no states at inference. Held against its parallel kernel."""
    names = compat.kernel_names("sigmoid", normalize=normalize)
    assert names["step_kernel"] == "tfla_siging" + suffix
    inputs, tokens = head_first(40), 37
    run = backend(mode="inference", **names)
    with torch.no_grad():
        h, state = run(*inputs.map(lambda x: x[:, :, :tokens]))
        rows = [h]
        for t in range(tokens, 40):
            h, state = run(*inputs.map(lambda x, t=t: x[:, :, t : t + 1]), *state)
            rows.append(h)
        expected = get_mlstm_kernel("parallel--native_siging_autograd")(*inputs, normalize=normalize)
    assert relative_error(torch.cat(rows, 2), expected) < ROUNDING
    assert not state[2].any()


def test_states_are_interchangeable():
    inputs = head_first(96)
    first, second = (inputs.map(lambda x, s=s: x[:, :, s]) for s in (slice(0, 64), slice(64, 96)))
    ours, theirs = get_mlstm_kernel("chunkwise--tfla"), get_mlstm_kernel("chunkwise--native_autograd")
    expected = theirs(*inputs, chunk_size=32)[:, :, 64:]
    for before, after in ((ours, theirs), (theirs, ours)):
        _, state = before(*first, return_last_states=True, chunk_size=32)
        assert relative_error(after(*second, *state, chunk_size=32), expected) < ROUNDING


def test_gradients_through_the_last_state():
    """Of the true state C exp(m): m has a gradient in native_autograd, where C hangs on it, and none here."""
    inputs = head_first(64)
    grads = []
    for name in ("chunkwise--tfla", "chunkwise--native_autograd"):
        leaves = inputs.leaves()
        _, (C, n, m) = get_mlstm_kernel(name)(*leaves, return_last_states=True)
        scale = torch.exp(m)
        ((C * scale.unsqueeze(-1)).square().sum() + (n * scale).square().sum()).backward()
        grads.append([x.grad for x in (leaves.k, leaves.v, leaves.i, leaves.f)])
    for name, x, y in zip("kvif", *grads, strict=True):
        assert relative_error(x, y) < GRADIENT_ROUNDING, name


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("name", ["tfla", "tfla_siging", "tfla_siging_unnormalized"])
def test_steps_equal_the_sequence_kernel(name, eps):
    inputs, state = head_first(7), states()
    step, sequence = get_mlstm_step_kernel(name), get_mlstm_sequence_kernel(name)
    expected, expected_state = sequence(*inputs, *state, return_last_states=True, eps=eps)
    before = [x.clone() for x in state]
    now, rows = state, []
    for t in range(7):
        q, k, v = (x[:, :, t] for x in (inputs.q, inputs.k, inputs.v))
        i, f = inputs.i[:, :, t : t + 1], inputs.f[:, :, t : t + 1]
        h, now = step(q, k, v, i, f, *now, eps=eps)
        rows.append(h)
    assert relative_error(torch.stack(rows, 2), expected) < 1e-6
    for x, y in zip(now, expected_state, strict=True):
        assert relative_error(x, y) < 1e-6
    for x, y in zip(state, before, strict=True):  # a step makes new states, as theirs does
        assert torch.equal(x, y)


def test_native_sequence_and_step_alike():
    inputs, state = head_first(9), states()
    ours, theirs = get_mlstm_sequence_kernel("tfla"), get_mlstm_sequence_kernel("native_sequence__native")
    (h, last), (expected, expected_last) = (x(*inputs, *state, return_last_states=True) for x in (ours, theirs))
    assert relative_error(h, expected) < ROUNDING
    for x, y in zip(last, expected_last, strict=True):
        assert relative_error(x, y) < ROUNDING


def test_autocast_decides_the_dtype_of_the_kernel():
    inputs = head_first(32)
    run = backend(chunkwise_kernel="chunkwise--tfla", return_last_states=False, autocast_kernel_dtype="float16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = run(*inputs)
    assert h.dtype == torch.float16
    assert run(*inputs).dtype == torch.float32


def large_model(names, **options):
    torch.manual_seed(0)
    config = xLSTMLargeConfig(
        embedding_dim=64, num_heads=2, num_blocks=2, vocab_size=50, return_last_states=True, chunk_size=32,
        **names, **options,
    )  # fmt: skip
    return xLSTMLarge(config)


def training_losses(model, steps=8, tokens=64):
    data = torch.randint(0, 50, (2, tokens + 1), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        logits, _ = model(data[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_xlstm_large_trains_and_generates_alike():
    losses, tokens = [], []
    for names in (compat.kernel_names(), NATIVE):
        model = large_model(names)
        losses.append(training_losses(model))
        decoder = large_model(names, mode="inference")
        decoder.load_state_dict(model.state_dict())
        prompt = torch.randint(0, 50, (2, 21), generator=torch.Generator().manual_seed(4))
        tokens.append(decoder.generate(prompt, max_length=24)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert torch.equal(*tokens)


def test_xlstm_large_with_the_sigmoid_gate():
    names = compat.kernel_names("sigmoid")
    model = large_model(names)
    losses = training_losses(model, tokens=50)
    assert losses[-1] < 0.9 * losses[0]
    decoder = large_model(names, mode="inference")
    decoder.load_state_dict(model.state_dict())
    prompt = torch.randint(0, 50, (2, 21), generator=torch.Generator().manual_seed(4))
    generated, _ = decoder.generate(prompt, max_length=10)
    with torch.no_grad():  # the same tokens, one whole sequence at a time
        whole = prompt
        for _ in range(10):
            logits, _ = model(whole)
            whole = torch.cat([whole, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated, whole[:, 21:])


REFUSED = [
    ("chunkwise--tfla", {"c_initial": states()[0]}, ValueError, "n_initial is missing"),
    ("chunkwise--tfla", dict(zip(("c_initial", "n_initial", "m_initial"), make_state(B, NH, DQK, DHV), strict=True)),
     ValueError, "m_initial has shape"),
    ("chunkwise--tfla", {"chunk_size": 0}, ValueError, "chunk_size is 0"),
    ("chunkwise--tfla", {"siz_b_L_loop": 64}, TypeError, "siz_b_L_loop"),
    ("chunkwise--tfla", {"i": torch.zeros(B, NH, 7)}, ValueError, "i has shape"),
    ("chunkwise--tfla_siging_unnormalized", {"normalize": True}, ValueError, "normalize is True"),
    ("parallel--tfla", {"return_last_states": True}, ValueError, "return_last_states is given to a parallel"),
    ("parallel--tfla", {"c_initial": states()[0]}, ValueError, "c_initial is given to a parallel"),
    ("parallel--tfla_siging", {"stable_fgate": False}, ValueError, "stable_fgate is False"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "change", "error", "sentence"), REFUSED, ids=[row[3] for row in REFUSED])
def test_refused(kernel, change, error, sentence):
    arguments = dict(zip("qkvif", head_first(8), strict=True)) | change
    with pytest.raises(error, match=sentence):
        get_mlstm_kernel(kernel)(**arguments)


def test_kernel_names_are_refused():
    with pytest.raises(ValueError, match="gate is 'relu'"):
        compat.kernel_names("relu")
    with pytest.raises(ValueError, match="normalize is False for the exponential gate"):
        compat.kernel_names("exp", normalize=False)
