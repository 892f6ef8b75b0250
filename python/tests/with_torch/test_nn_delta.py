"""tfla.nn.GatedDeltaNet: against its formula in float64, and its modes against each other."""

import math

import pytest
import torch
import torch.nn.functional as F

from tfla.nn import DeltaState, GatedDeltaNet, short_conv
from tfla.reference import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
DIM, HEADS, HEAD = 24, 2, 6
VARIANTS = [
    {},
    {"allow_neg_eigval": True, "num_v_heads": 4, "expand_v": 1.5},
    {"use_decay": False, "use_gate": False, "conv_bias": True},
    {"use_short_conv": False},
    {"conv_size": 1, "fuse": True},
]


@pytest.fixture(params=["kernels", "torch"])
def either_convolution(request, monkeypatch):
    """The code for devices without kernels runs on any device."""
    if request.param == "torch":
        monkeypatch.setattr(short_conv, "has_kernels", lambda x, width: False)


def make_layer(**options) -> GatedDeltaNet:
    """With gates in the middle of their range, and norms that differ from channel to channel."""
    torch.manual_seed(0)
    layer = GatedDeltaNet(
        DIM, HEADS, HEAD, **{"norm_eps": 1e-2, "A_range": (0.5, 2.0), "dt_range": (0.05, 1), **options}
    )
    with torch.no_grad():
        layer.o_norm.weight.normal_(mean=1.0)
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5 if "conv" in name else 0.3)
    return layer


def unit(x):
    return x / (x.square().sum(-1, True) + 1e-6).sqrt()


def formula(layer: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    """Of one row of tokens (T,DIM), token by token in float64."""
    w = {name: value.double() for name, value in layer.state_dict().items()}
    x = x.double()

    def mixed(name, heads):
        y = x @ w[f"{name}_proj.weight"].T
        if layer.use_short_conv:
            kernel, rows = w[f"{name}_conv1d.weight"][:, 0], []
            for t in range(len(y)):
                taps = [(y[t - s], kernel[:, -1 - s]) for s in range(kernel.shape[1]) if t >= s]
                rows.append(sum(a * b for a, b in taps) + w.get(f"{name}_conv1d.bias", 0))
            y = torch.stack(rows)
        return (y * torch.sigmoid(y)).unflatten(-1, (heads, -1))

    group = layer.num_v_heads // HEADS
    q, k = (unit(mixed(name, HEADS)).repeat_interleave(group, 1) for name in "qk")
    v = mixed("v", layer.num_v_heads)
    beta = torch.sigmoid(x @ w["b_proj.weight"].T) * (2 if layer.allow_neg_eigval else 1)
    decay = torch.ones_like(beta)
    if layer.use_decay:
        decay = torch.exp(-w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"]))
    C, rows = torch.zeros(layer.num_v_heads, HEAD, layer.head_v_dim, dtype=torch.float64), []
    for t in range(len(x)):
        C = decay[t, :, None, None] * C
        residual = v[t] - (k[t, :, :, None] * C).sum(1)
        C = C + k[t, :, :, None] * (beta[t, :, None] * residual)[:, None]
        rows.append((q[t, :, :, None] * C).sum(1) / math.sqrt(HEAD))
    h = torch.stack(rows)
    h = h / (h.square().mean(-1, True) + 1e-2).sqrt() * w["o_norm.weight"]
    if layer.use_gate:
        gate = (x @ w["g_proj.weight"].T).unflatten(-1, (layer.num_v_heads, -1))
        h = h * gate * torch.sigmoid(gate)
    return h.flatten(-2) @ w["o_proj.weight"].T


@pytest.mark.usefixtures("either_convolution")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_layer_is_its_formula(options):
    layer, x = make_layer(**options), torch.randn(2, 19, DIM)
    with torch.no_grad():
        assert relative_error(layer(x), torch.stack([formula(layer, row) for row in x])) < 1e-5
        exact = make_layer(**options, dtype=torch.float64)
        assert relative_error(exact(x.double()), torch.stack([formula(exact, row) for row in x])) < 1e-12


@pytest.mark.usefixtures("either_convolution")
@pytest.mark.parametrize("options", VARIANTS[:3], ids=str)
def test_gradients_are_those_of_the_formula(options):
    layer, x = make_layer(**options, dtype=torch.float64), torch.randn(13, DIM, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    weights = torch.randn(13, DIM, dtype=torch.float64)
    actual = torch.autograd.grad((layer(x[None])[0] * weights).sum(), [x, *parameters])
    # The formula reads state_dict, whose tensors are detached: in their place come the parameters themselves.
    layer.state_dict = lambda: dict(zip(names, parameters, strict=True))
    expected = torch.autograd.grad((formula(layer, x) * weights).sum(), [x, *parameters])
    for name, a, b in zip(("x", *names), actual, expected, strict=True):
        assert relative_error(a, b) < 1e-10, name


@pytest.mark.usefixtures("either_convolution")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_prefill_and_decode_continue_training(options):
    layer, x = make_layer(**options), torch.randn(2, 30, DIM)
    with torch.no_grad():
        whole = layer(x)
        first, state = layer.prefill(x[:, :11])
        second, state = layer.prefill(x[:, 11:13], state)  # fewer tokens than the convolution looks back
        third = torch.stack([layer.decode(x[:, t], state) for t in range(13, 25)], dim=1)
        fourth = layer.decode(x[:, 25:], state)
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(state, layer.new_state(2), strict=True))
        again, anew = layer.prefill(x), layer.new_state(2)
        decoded = torch.stack([layer.decode(x[:, t], anew) for t in range(30)], dim=1)
    parts = torch.cat([first, second, third, fourth], dim=1)
    assert all(relative_error(y, whole) < 1e-5 for y in (parts, again[0], decoded))
    for a, b, c in zip(state, again[1], anew, strict=True):
        assert a.numel() == 0 or (relative_error(a, b) < 1e-5 and relative_error(c, b) < 1e-5)


@pytest.mark.usefixtures("either_convolution")
def test_decode_in_slots():
    layer, x = make_layer(), torch.randn(3, DIM)
    with torch.no_grad():
        _, pool = layer.prefill(torch.randn(5, 7, DIM))
        before, rows = pool.clone(), pool.rows([3, 1, 0])  # as many: PyTorch's products of two rows have other bits
        y = layer.decode(x, pool, slots=torch.tensor([3, -1, 0]))  # the second is padding
        assert torch.equal(y[[0, 2]], layer.decode(x, rows)[[0, 2]]) and not y[1].any()
    for now, then, own in zip(pool, before, rows, strict=True):
        assert torch.equal(now[[3, 0]], own[[0, 2]]) and torch.equal(now[[1, 2, 4]], then[[1, 2, 4]])
        assert not torch.equal(now[0], then[0])


@pytest.mark.usefixtures("either_convolution")
@pytest.mark.parametrize("options", [{}, {"use_decay": False}, {"use_short_conv": False}], ids=str)
def test_packed_documents_do_not_see_each_other(options):
    layer, x = make_layer(**options, dtype=torch.float64), torch.randn(1, 20, DIM, dtype=torch.float64)
    bounds = [0, 7, 8, 8, 10, 20]  # one of a token, an empty one, one shorter than the convolution
    packed, state = layer.prefill(x, cu_seqlens=torch.tensor(bounds))
    parts = [x[:, a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    alone = [layer.prefill(part) for part in parts if part.shape[1]]
    assert relative_error(packed, torch.cat([y for y, _ in alone], 1)) < 1e-12
    assert relative_error(layer(x, cu_seqlens=torch.tensor([*bounds, 20])), packed) < 1e-12  # the last entry again
    for mine, *theirs in zip(state, *(s for _, s in alone), strict=True):
        assert mine.numel() == 0 or relative_error(mine[[0, 1, 3, 4]], torch.cat(theirs)) < 1e-12
        assert not mine[2].any()
    # And they go on from their states, packed again.
    more = torch.randn(1, 9, DIM, dtype=torch.float64)
    packed, last = layer.prefill(more, state, cu_seqlens=torch.tensor([0, 1, 3, 3, 3, 9]))
    for n, (a, b) in enumerate([(0, 1), (1, 3), (3, 3), (3, 3), (3, 9)]):
        own = DeltaState(*(s[n : n + 1] for s in state))
        if a == b:
            assert all(torch.equal(mine[n : n + 1], theirs) for mine, theirs in zip(last, own, strict=True))
            continue
        y, after = layer.prefill(more[:, a:b], own)
        assert relative_error(packed[:, a:b], y) < 1e-12
        assert all(x.numel() == 0 or relative_error(x[n : n + 1], y) < 1e-12 for x, y in zip(last, after, strict=True))


@pytest.mark.usefixtures("either_convolution")
@pytest.mark.parametrize("options", [{}, {"use_decay": False}, {"use_short_conv": False}], ids=str)
def test_starts_are_packed_documents(options):
    layer, x = make_layer(**options, dtype=torch.float64), torch.randn(2, 20, DIM, dtype=torch.float64)
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, 0] = starts[0, 7] = starts[0, 8] = starts[1, 12] = True
    grads = []
    for run in (
        lambda: layer(x, starts=starts),
        lambda: layer(x.view(1, 40, DIM), cu_seqlens=torch.tensor([0, 7, 8, 20, 32, 40])).view(2, 20, DIM),
    ):
        y = run()
        grads.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    assert all(relative_error(a, b) < 1e-10 for a, b in zip(*grads, strict=True))


PROJECTIONS = {
    "q_proj.weight": (12, 24),
    "k_proj.weight": (12, 24),
    "v_proj.weight": (24, 24),
    "o_proj.weight": (24, 24),
}
CONVOLUTIONS = {"q_conv1d.weight": (12, 1, 4), "k_conv1d.weight": (12, 1, 4), "v_conv1d.weight": (24, 1, 4)}
OUTPUT = {"b_proj.weight": (2, 24), "o_norm.weight": (12,), "o_proj.weight": (24, 24)}


def test_parameters_are_named_as_published():
    """flash-linear-attention's GatedDeltaNet(hidden_size=24, num_heads=2, head_dim=6), and its DeltaNet."""
    shapes = lambda layer: {name: tuple(x.shape) for name, x in layer.state_dict().items()}  # noqa: E731
    common = PROJECTIONS | CONVOLUTIONS | OUTPUT
    decay = {"a_proj.weight": (2, 24), "A_log": (2,), "dt_bias": (2,)}
    assert shapes(GatedDeltaNet(DIM, HEADS, HEAD)) == common | decay | {"g_proj.weight": (24, 24)}
    assert shapes(GatedDeltaNet(DIM, HEADS, HEAD, use_decay=False, use_gate=False)) == common
    biases = {"q_conv1d.bias": (12,), "k_conv1d.bias": (12,), "v_conv1d.bias": (24,)}
    assert shapes(GatedDeltaNet(DIM, HEADS, HEAD, use_gate=False, conv_bias=True)) == common | decay | biases


def test_beginning():
    layer = GatedDeltaNet(64, 512, 1, expand_v=1.0, use_short_conv=False)
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 1 <= A.min() < 1.5 and 15.5 < A.max() <= 16 and abs(A.mean() - 8.5) < 5 * 15 / math.sqrt(12 * 512)
    assert 1e-3 * 0.999 < dt.min() < 1.2e-3 and 0.08 < dt.max() < 0.1 * 1.001
    assert abs(dt.log().mean() - math.log(1e-2)) < 5 * math.log(100) / math.sqrt(12 * 512)
    assert GatedDeltaNet(32, 2).head_dim == 12 and layer.o_norm.weight.tolist() == [1.0]


def test_made_on_meta_and_filled_later():
    layer = GatedDeltaNet(DIM, HEADS, HEAD, device="meta").to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer(torch.randn(1, 5, DIM)).isfinite().all() and 0 <= layer.A_log.min() and layer.A_log.max() < 2.78


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_whole_layer_in_a_dtype(dtype):
    layer, x = make_layer(dtype=dtype), torch.randn(2, 9, DIM, dtype=dtype)
    with torch.no_grad():
        y, state = layer.prefill(x)
        layer.decode(x[:, 0], state)
    assert y.dtype == dtype and state.C.dtype == layer.A_log.dtype != torch.bfloat16


def test_master_weights_in_float32():
    layer, x = make_layer(), torch.randn(2, 9, DIM)
    y = layer(x.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and relative_error(y, layer(x)) < 0.05
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


def test_fused_projections_are_the_separate_ones():
    separate, fused, x = make_layer(), make_layer(fuse=True), torch.randn(2, 9, DIM)
    fused.load_state_dict(separate.state_dict())
    grads = []
    for layer in (separate, fused):
        y = layer(x)
        y.square().sum().backward()
        grads.append([y, *(parameter.grad for parameter in layer.parameters())])
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(*grads, strict=True))
    seen = []
    fused.q_proj.register_forward_hook(lambda *_: seen.append(1))
    assert relative_error(fused(x), grads[0][0]) < 1e-5 and seen == [1]


def test_training_through_states_lowers_the_loss():
    layer, x = make_layer(), torch.randn(4, 32, DIM)
    target = torch.roll(x, 6, dims=1)  # beyond the convolution: needs the state
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        first, state = layer.prefill(x[:, :15])
        second, _ = layer.prefill(x[:, 15:], state)
        loss = F.mse_loss(torch.cat([first, second], dim=1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_compiled_layer():
    layer, x = make_layer(), torch.randn(1, 20, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for options in ({}, {"cu_seqlens": torch.tensor([0, 7, 20])}):
        assert relative_error(compiled(x, **options), layer(x, **options)) < 1e-6
    compiled(x).sum().backward()


def test_exported_layer():
    layer, x = make_layer(), torch.randn(2, 9, DIM)
    exported = torch.export.export(layer, (x,))
    assert torch.equal(exported.module()(x), layer(x))


def test_autocast():
    layer, x = make_layer(), torch.randn(2, 9, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y, state = layer.prefill(x)
        assert {part.dtype for part in state} == {torch.float32} and layer.decode(x[:, 0], state).dtype == y.dtype
    # Products and their inputs in bfloat16, some roundings of 2^-9 one after another.
    assert y.dtype == torch.bfloat16 and relative_error(y, layer(x)) < 0.05


def test_states():
    layer = make_layer()
    state = layer.new_state(3)
    assert [tuple(x.shape) for x in state] == [(3, 2, 6, 12), (3, 3, 12), (3, 3, 12), (3, 3, 24)]
    full = DeltaState(*(torch.randn_like(x) for x in state))
    state.copy_(full)
    state.reset_(1)
    assert all(not x[1].any() and torch.equal(x[2], y[2]) for x, y in zip(state, full, strict=True))
    assert all(x.dtype == torch.float64 for x in full.to(torch.float64)) and full.clone().C is not full.C
    assert not DeltaState(*(x.requires_grad_() for x in full)).detach().q.requires_grad


REFUSED = [
    ({"expand_v": 1.25}, "expand_v is 1.25; times head_dim 6"),
    ({"num_v_heads": 3}, "num_v_heads is 3; it must be a positive multiple of num_heads, 2"),
    ({"conv_size": 0}, "conv_size is 0"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[row[1] for row in REFUSED])
def test_refused(options, sentence):
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        GatedDeltaNet(DIM, HEADS, HEAD, **options)


def test_modes_are_checked():
    layer, x = make_layer(), torch.randn(1, 4, DIM)
    starts, bounds = torch.zeros(1, 4, dtype=torch.bool), torch.tensor([0, 4])
    for arguments, sentence in (
        ({"mode": "eval"}, "mode is 'eval'"),
        ({"mode": "decode"}, "which needs state"),
        ({"mode": "decode", "state": layer.new_state(1), "cu_seqlens": bounds}, "takes no cu_seqlens"),
        ({"mode": "prefill", "slots": torch.tensor([0])}, "only 'decode' takes slots"),
        ({"mode": "prefill", "starts": starts}, "starts is given with mode 'prefill'"),
        ({"starts": starts, "cu_seqlens": bounds}, "only 'train' takes it, alone"),
        ({"cu_seqlens": bounds[None]}, "cu_seqlens has 2 axes"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens ends with 5; there are 4 tokens"),
    ):
        with pytest.raises(ValueError, match=f"^tfla: .*{sentence}"):
            layer(x, **arguments)
