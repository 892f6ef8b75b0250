"""tfla.nn.Mamba2: against its formula in float64, and its modes against each other."""

import math

import pytest
import torch
import torch.nn.functional as F

from tfla.nn import Mamba2, Mamba2State
from tfla.reference import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
DIM, HEAD, STATES = 12, 6, 5  # four heads
VARIANTS = [
    {},
    {"ngroups": 2, "norm_before_gate": True, "D_has_hdim": True},
    {"rmsnorm": False, "bias": True, "conv_bias": False, "dt_limit": (0.1, 0.5)},
    {"d_conv": 1, "headdim": 24, "chunk_size": 16},
    {"ngroups": 4, "expand": 4, "d_conv": 3},
]


def make_layer(**options) -> Mamba2:
    """With steps in the middle of their range, and norms that differ from channel to channel."""
    torch.manual_seed(0)
    named = {"d_state": STATES, "headdim": HEAD, "A_init_range": (0.5, 2.0), "dt_min": 0.05, "dt_max": 1.0, **options}
    layer = Mamba2(DIM, norm_eps=1e-2, **named)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("norm.weight", "D"):
                parameter.normal_(mean=1.0)
            elif parameter.dim() > 1 or name.endswith("proj.bias"):
                parameter.normal_(std=0.5 if "conv" in name else 0.3)
    return layer


def formula(layer: Mamba2, x: torch.Tensor) -> torch.Tensor:
    """Of one row of tokens (T,DIM), token by token in float64."""
    w = {name: value.double() for name, value in layer.state_dict().items()}
    inner, groups, heads = w["out_proj.weight"].shape[1], layer.ngroups, len(w["A_log"])
    z, xBC, dt = (x.double() @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)).split(
        [inner, inner + 2 * groups * STATES, heads], -1
    )
    kernel, rows = w["conv1d.weight"][:, 0], []
    for t in range(len(x)):
        taps = [(xBC[t - s], kernel[:, -1 - s]) for s in range(kernel.shape[1]) if t >= s]
        rows.append(sum(a * b for a, b in taps) + w.get("conv1d.bias", 0))
    xBC = torch.stack(rows)
    v, B, C = (xBC * torch.sigmoid(xBC)).split([inner, groups * STATES, groups * STATES], -1)
    v = v.unflatten(-1, (heads, -1))
    B, C = (part.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for part in (B, C))
    dt = F.softplus(dt + w["dt_bias"]).clamp(*layer.dt_limit)
    S, rows = torch.zeros(heads, v.shape[-1], STATES, dtype=torch.float64), []
    for t in range(len(x)):
        S = torch.exp(-dt[t] * w["A_log"].exp())[:, None, None] * S + (dt[t, :, None] * v[t])[..., None] * B[t, :, None]
        rows.append((S * C[t, :, None]).sum(-1) + w["D"].view(heads, -1) * v[t])
    y, gate = torch.stack(rows).flatten(1), z * torch.sigmoid(z)
    before = layer.norm is not None and layer.norm.norm_before_gate
    y = y if before else y * gate
    if layer.norm is not None:
        parts = [part / (part.square().mean(-1, True) + 1e-2).sqrt() for part in y.chunk(groups, -1)]
        y = torch.cat(parts, -1) * w["norm.weight"]
    y = y * gate if before else y
    return y @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_layer_is_its_formula(options):
    layer, x = make_layer(**options), torch.randn(2, 19, DIM)
    with torch.no_grad():
        assert relative_error(layer(x), torch.stack([formula(layer, row) for row in x])) < 1e-5
        exact = make_layer(**options, dtype=torch.float64)
        assert relative_error(exact(x.double()), torch.stack([formula(exact, row) for row in x])) < 1e-12


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


def test_decode_in_slots():
    layer, x = make_layer(), torch.randn(3, DIM)
    with torch.no_grad():
        _, pool = layer.prefill(torch.randn(5, 7, DIM))
        before, rows = pool.clone(), pool.rows([3, 0])
        y = layer.decode(x, pool, slots=torch.tensor([3, -1, 0]))  # the second is padding
        assert relative_error(y[[0, 2]], layer.decode(x[[0, 2]], rows)) < 1e-6 and not y[1].any()
    for now, then, own in zip(pool, before, rows, strict=True):
        assert relative_error(now[[3, 0]], own) < 1e-6 and torch.equal(now[[1, 2, 4]], then[[1, 2, 4]])
        assert not torch.equal(now[0], then[0])


def test_decode_from_states_of_16_bits():
    layer, x = make_layer(), torch.randn(2, 20, DIM)
    with torch.no_grad():
        _, state = layer.prefill(x[:, :10])
        narrow = state.to(torch.bfloat16)
        pairs = [(layer.decode(x[:, t], state), layer.decode(x[:, t], narrow)) for t in range(10, 20)]
    assert narrow.S.dtype == torch.bfloat16 and all(relative_error(b, a) < 0.03 for a, b in pairs)


@pytest.mark.parametrize("options", VARIANTS[:3], ids=str)
def test_packed_documents_do_not_see_each_other(options):
    layer, x = make_layer(**options, dtype=torch.float64), torch.randn(1, 20, DIM, dtype=torch.float64)
    bounds = [0, 7, 8, 8, 10, 20]  # one of a token, an empty one, one shorter than the convolution
    packed, state = layer.prefill(x, cu_seqlens=torch.tensor(bounds))
    parts = [x[:, a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    alone = [layer.prefill(part) for part in parts if part.shape[1]]
    assert relative_error(packed, torch.cat([y for y, _ in alone], 1)) < 1e-12
    assert relative_error(layer(x, cu_seqlens=torch.tensor([*bounds, 20])), packed) < 1e-12  # the last entry again
    for mine, *theirs in zip(state, *(s for _, s in alone), strict=True):
        assert relative_error(mine[[0, 1, 3, 4]], torch.cat(theirs)) < 1e-12
        assert not mine[2].any()
    # And they go on from their states, packed again.
    more = torch.randn(1, 9, DIM, dtype=torch.float64)
    packed, last = layer.prefill(more, state, cu_seqlens=torch.tensor([0, 1, 3, 3, 3, 9]))
    for n, (a, b) in enumerate([(0, 1), (1, 3), (3, 3), (3, 3), (3, 9)]):
        own = Mamba2State(*(s[n : n + 1] for s in state))
        if a == b:
            assert all(torch.equal(mine[n : n + 1], theirs) for mine, theirs in zip(last, own, strict=True))
            continue
        y, after = layer.prefill(more[:, a:b], own)
        assert relative_error(packed[:, a:b], y) < 1e-12
        assert all(relative_error(x[n : n + 1], y) < 1e-12 for x, y in zip(last, after, strict=True))


@pytest.mark.parametrize("by_number", [False, True], ids=["starts", "seq_idx"])
@pytest.mark.parametrize("options", VARIANTS[:3], ids=str)
def test_starts_are_packed_documents(options, by_number):
    layer, x = make_layer(**options, dtype=torch.float64), torch.randn(2, 20, DIM, dtype=torch.float64)
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, 0] = starts[0, 7] = starts[0, 8] = starts[1, 12] = True
    given = {"seq_idx": 7 - starts.int().cumsum(1)} if by_number else {"starts": starts}
    grads = []
    for run in (
        lambda: layer(x, **given),
        lambda: layer(x.view(1, 40, DIM), cu_seqlens=torch.tensor([0, 7, 8, 20, 32, 40])).view(2, 20, DIM),
    ):
        y = run()
        grads.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    assert all(relative_error(a, b) < 1e-10 for a, b in zip(*grads, strict=True))


def test_parameters_are_named_as_published():
    """mamba_ssm's Mamba2(768), as in mamba2-130m, and with its options."""
    shapes = lambda layer: {name: tuple(x.shape) for name, x in layer.state_dict().items()}  # noqa: E731
    common = {
        "dt_bias": (24,), "A_log": (24,), "D": (24,), "in_proj.weight": (3352, 768), "conv1d.weight": (1792, 1, 4),
        "conv1d.bias": (1792,), "norm.weight": (1536,), "out_proj.weight": (768, 1536),
    }  # fmt: skip
    assert shapes(Mamba2(768, device="meta")) == common
    changed = shapes(Mamba2(768, bias=True, conv_bias=False, rmsnorm=False, D_has_hdim=True, ngroups=2, device="meta"))
    assert changed == {
        **{name: common[name] for name in ("dt_bias", "A_log", "out_proj.weight")}, "D": (1536,),
        "in_proj.weight": (3608, 768), "in_proj.bias": (3608,), "conv1d.weight": (2048, 1, 4), "out_proj.bias": (768,),
    }  # fmt: skip


def test_beginning():
    layer = Mamba2(64, d_state=4, expand=8, headdim=1)
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 1 <= A.min() < 1.5 and 15.5 < A.max() <= 16.001 and abs(A.mean() - 8.5) < 5 * 15 / math.sqrt(12 * 512)
    assert 1e-3 * 0.999 < dt.min() < 1.2e-3 and 0.08 < dt.max() < 0.1 * 1.001
    assert abs(dt.log().mean() - math.log(1e-2)) < 5 * math.log(100) / math.sqrt(12 * 512)
    assert layer.D.tolist() == [1.0] * 512 and layer.norm.weight.tolist() == [1.0] * 512
    floor = F.softplus(Mamba2(64, d_state=4, expand=8, headdim=1, dt_init_floor=0.02).dt_bias)
    assert abs(floor.min() - 0.02) < 1e-6 and floor.max() > 0.08


def test_made_on_meta_and_filled_later():
    layer = Mamba2(DIM, STATES, headdim=HEAD, device="meta").to_empty(device="cpu")
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
    assert y.dtype == dtype and state.S.dtype == layer.A_log.dtype == layer.D.dtype != torch.bfloat16


def test_master_weights_in_float32():
    layer, x = make_layer(), torch.randn(2, 9, DIM)
    y = layer(x.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and relative_error(y, layer(x)) < 0.05
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


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


@pytest.mark.parametrize("options", [{}, {"seq_idx": torch.zeros(2, 0, dtype=torch.int32)}], ids=["plain", "seq_idx"])
def test_no_tokens(options):
    layer = make_layer()
    assert layer(torch.randn(2, 0, DIM), **options).shape == (2, 0, DIM)


def test_compiled_layer():
    layer, x = make_layer(), torch.randn(1, 20, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for options in ({}, {"cu_seqlens": torch.tensor([0, 7, 20])}, {"seq_idx": torch.arange(20)[None] // 9}):
        assert relative_error(compiled(x, **options), layer(x, **options)) < 1e-6
    compiled(x).sum().backward()


def test_exported_layer():
    layer, x = make_layer(), torch.randn(2, 9, DIM)
    exported = torch.export.export(layer, (x,))
    assert relative_error(exported.module()(x), layer(x)) < 1e-6


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
    assert [tuple(x.shape) for x in state] == [(3, 4, 6, 5), (3, 3, 34)]
    full = Mamba2State(*(torch.randn_like(x) for x in state))
    state.copy_(full)
    state.reset_(1)
    assert all(not x[1].any() and torch.equal(x[2], y[2]) for x, y in zip(state, full, strict=True))
    assert all(x.dtype == torch.float64 for x in full.to(torch.float64)) and full.clone().S is not full.S
    assert not Mamba2State(*(x.requires_grad_() for x in full)).detach().xBC.requires_grad


REFUSED = [
    ({"headdim": 5}, r"headdim is 5; it must divide expand \* d_model, 24"),
    ({"ngroups": 3}, "ngroups is 3; it must be a positive divisor of the heads, 4"),
    ({"d_conv": 0}, "d_conv is 0"),
    ({"A_init_range": (0.0, 1.0)}, "A_init_range is"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[row[1] for row in REFUSED])
def test_refused(options, sentence):
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        Mamba2(DIM, **{"headdim": HEAD, **options})


def test_modes_are_checked():
    layer, x = make_layer(), torch.randn(1, 4, DIM)
    starts, bounds, numbers = torch.zeros(1, 4, dtype=torch.bool), torch.tensor([0, 4]), torch.zeros(1, 4)
    for arguments, sentence in (
        ({"mode": "eval"}, "mode is 'eval'"),
        ({"mode": "decode"}, "which needs state"),
        ({"mode": "decode", "state": layer.new_state(1), "cu_seqlens": bounds}, "takes no cu_seqlens"),
        ({"mode": "prefill", "slots": torch.tensor([0])}, "only 'decode' takes slots"),
        ({"mode": "prefill", "starts": starts}, "starts is given with mode 'prefill'"),
        ({"starts": starts, "cu_seqlens": bounds}, "only 'train' takes it, alone"),
        ({"seq_idx": numbers, "state": layer.new_state(1)}, "seq_idx is given with mode 'train', state"),
        ({"starts": starts, "seq_idx": numbers}, "both given"),
        ({"cu_seqlens": bounds[None]}, "cu_seqlens has 2 axes"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens ends with 5; there are 4 tokens"),
    ):
        with pytest.raises(ValueError, match=f"^tfla: .*{sentence}"):
            layer(x, **arguments)
