"""tfla.compat.fla against recurrences in float64 and flash-linear-attention's own naive references."""

import importlib.util
from importlib.metadata import files
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tfla.compat import fla
from tfla.reference import relative_error

B, T, H, K, V = 2, 45, 3, 8, 12
BOUNDS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4), torch.bfloat16: (2.5e-3, 2.5e-3)}


def published(module: str):
    """A module of fla-core by its file: importing the package asks for Triton, its naive references do not."""
    path = next(Path(x.locate()) for x in files("fla-core") if str(x) == f"fla/ops/{module}.py")
    spec = importlib.util.spec_from_file_location(module.replace("/", "_"), path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def naive(q, k, v, g, scale=None, state=None, reverse=False):
    """One sequence after another would be the same: (B,T,H,D) in float64, differentiated by PyTorch."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    S = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3]) if state is None else state.double()
    rows = [None] * v.shape[1]
    for t in reversed(range(v.shape[1])) if reverse else range(v.shape[1]):
        S = torch.exp(g[:, t])[..., None, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows[t] = torch.einsum("bhk,bhkv->bhv", scale * q[:, t], S)
    return torch.stack(rows, 1), S


def tensors(dtype=torch.float32, batch=B, heads=H, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(batch, T, H, K), draw(batch, T, H, K), draw(batch, T, heads, V)
    g = F.logsigmoid(draw(batch, T, heads) + 2)
    g[:, 5] = 0.0  # keeps everything
    g[:, 20, 0] = -torch.inf  # starts afresh
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    return q.to(dtype), k.to(dtype), v.to(dtype), g.to(gates), draw(batch, heads, K, V).to(gates)


def leaves(*xs):
    return [x.detach().clone().requires_grad_() for x in xs]


def check(run, expect, inputs, names, dtype=torch.float32, output_dtype=None):
    """Values, final states and gradients of `run` against those of `expect`, both (o, state) of the same inputs."""
    given, wanted = leaves(*inputs), leaves(*(x.double() for x in inputs))
    (o, state), (o_ref, state_ref) = run(*given), expect(*wanted)
    bound, grad_bound = BOUNDS[dtype]
    assert o.dtype == (output_dtype or dtype)
    assert relative_error(o, o_ref) < bound
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(o.dtype)
    dstate = torch.randn(state.shape, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    assert relative_error(state, state_ref) < BOUNDS[torch.float64 if dtype == torch.float64 else torch.float32][0]
    torch.autograd.backward([o, state], [do, dstate.to(state.dtype)])
    torch.autograd.backward([o_ref, state_ref], [do.double(), dstate])
    for name, x, y in zip(names, given, wanted, strict=True):
        expected = torch.nan_to_num(y.grad)  # exp(g) has no derivative at -inf; the limit is 0
        assert relative_error(x.grad, expected) < grad_bound, name


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("heads", [H, 2 * H])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("function", [fla.chunk_simple_gla, fla.fused_recurrent_simple_gla])
def test_simple_gla(function, dtype, heads, v_first):
    q, k, v, g, state = tensors(dtype, heads=heads)
    turn = (lambda x: x.transpose(-1, -2)) if v_first else (lambda x: x)

    def run(q, k, v, g, state):
        o, last = function(
            q, k, v, g=g, initial_state=turn(state), output_final_state=True, scale=0.3, state_v_first=v_first
        )
        return o, turn(last)

    check(run, lambda q, k, v, g, s: naive(q, k, v, g, 0.3, s), (q, k, v, g, state), "qkvgS", dtype)


@pytest.mark.parametrize("function", [fla.chunk_simple_gla, fla.fused_recurrent_simple_gla])
def test_decay_by_head_and_no_decay(function):
    q, k, v, _, _ = tensors(torch.float64)
    gamma = torch.tensor([0.0, -0.1, -2.0], dtype=torch.float64)
    check(
        lambda q, k, v, gamma: function(q, k, v, g_gamma=gamma, output_final_state=True),
        lambda q, k, v, gamma: naive(q, k, v, gamma.expand(B, T, H)),
        (q, k, v, gamma), ("q", "k", "v", "g_gamma"), torch.float64,
    )  # fmt: skip
    check(
        lambda q, k, v: function(q, k, v, output_final_state=True),
        lambda q, k, v: naive(q, k, v, torch.zeros(B, T, H)),
        (q, k, v), "qkv", torch.float64,
    )  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences(reverse):
    q, k, v, g, _ = tensors(torch.float64, batch=1)
    bounds = [0, 7, 8, 30, T]
    state = torch.randn(4, H, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    packing = torch.tensor(bounds)

    def one_by_one(q, k, v, g, state):
        parts = [
            naive(*(x[:, a:b] for x in (q, k, v, g)), state=state[s : s + 1], reverse=reverse)
            for s, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])

    def run(q, k, v, g, state):
        options = {"initial_state": state, "output_final_state": True, "cu_seqlens": packing}
        if reverse:
            return fla.fused_recurrent_simple_gla(q, k, v, g, reverse=True, **options)
        return fla.chunk_simple_gla(q, k, v, g, cu_seqlens_cpu=packing, **options)

    check(run, one_by_one, (q, k, v, g, state), "qkvgS", torch.float64)


def test_reverse_of_a_batch():
    inputs = tensors(torch.float64)
    check(
        lambda q, k, v, g, s: fla.fused_recurrent_simple_gla(
            q, k, v, g, initial_state=s, output_final_state=True, reverse=True
        ),
        lambda q, k, v, g, s: naive(q, k, v, g, state=s, reverse=True),
        inputs, "qkvgS", torch.float64,
    )  # fmt: skip


def test_published_naive_simple_gla():
    q, k, v, g, state = tensors()
    reference = published("simple_gla/naive").naive_recurrent_simple_gla
    expected, expected_state = reference(q, k, v, g, initial_state=state)
    for function in (fla.chunk_simple_gla, fla.fused_recurrent_simple_gla):
        o, last = function(q, k, v, g, initial_state=state, output_final_state=True)
        assert relative_error(o, expected) < 1e-5
        assert relative_error(last, expected_state) < 1e-5


def test_retention():
    q, k, v, _, state = tensors(torch.float64)
    decay = torch.log(1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))).expand(B, T, H)
    check(
        lambda q, k, v, s: fla.chunk_retention(q, k, v, initial_state=s, output_final_state=True, chunk_size=16),
        lambda q, k, v, s: naive(q, k, v, decay, state=s),
        (q, k, v, state), "qkvS", torch.float64,
    )  # fmt: skip
    reference = published("retention/naive").naive_retention
    expected = reference(*(x.float().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert relative_error(fla.chunk_retention(q.float(), k.float(), v.float())[0], expected) < 1e-5


def test_lightning_attention():
    q, k, v, _, state = tensors(torch.float64)
    decay = (-8 / H * (1 - 3 / 7) * torch.arange(H, dtype=torch.float64)).expand(B, T, H)
    check(
        lambda q, k, v, s: fla.chunk_lightning_attn(q, k, v, 3, 7, initial_state=s, output_final_state=True),
        lambda q, k, v, s: naive(q, k, v, decay, state=s),
        (q, k, v, state), "qkvS", torch.float64,
    )  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
def test_token_by_token_with_the_decays_of_retention_and_lightning_attention(reverse):
    q, k, v, _, state = tensors(torch.float64)
    heads, options = (
        torch.arange(H, dtype=torch.float64),
        {"output_final_state": True, "reverse": reverse, "scale": 0.4},
    )
    for run, decay in (
        (fla.fused_recurrent_retention, torch.log(1 - 2.0 ** (-5 - heads))),
        (lambda q, k, v, **x: fla.fused_recurrent_lightning_attn(q, k, v, 3, 7, **x), -8 / H * (1 - 3 / 7) * heads),
    ):
        check(
            lambda q, k, v, s, run=run: run(q, k, v, initial_state=s, **options),
            lambda q, k, v, s, decay=decay: naive(q, k, v, decay.expand(B, T, H), 0.4, s, reverse),
            (q, k, v, state), "qkvS", torch.float64,
        )  # fmt: skip


def test_states_with_values_first_and_the_former_name_of_that():
    q, k, v, g, state = tensors()
    for function, gate in ((fla.fused_recurrent_simple_gla, {"g": g}), (fla.fused_recurrent_retention, {})):
        expected, last = function(q, k, v, initial_state=state, output_final_state=True, **gate)
        turned = {"initial_state": state.transpose(-1, -2), "output_final_state": True, **gate}
        with pytest.warns(DeprecationWarning, match="transpose_state_layout is now named state_v_first"):
            former = function(q, k, v, **turned, transpose_state_layout=True)
        for o, S in (former, function(q, k, v, **turned, state_v_first=True)):
            assert torch.equal(o, expected) and torch.equal(S.transpose(-1, -2), last)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attention(normalize, with_state):
    q, k, v, _, S = tensors(torch.float64)
    q, k = q.abs() + 0.1, k.abs() + 0.1  # a denominator of mixed signs may vanish
    z = torch.rand(B, 1, H, K, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    state = ((S, z) if normalize else S) if with_state else None
    reference = published("linear_attn/naive").naive_recurrent_linear_attn

    def mine(q, k, v):
        o, last = fla.chunk_linear_attn(q, k, v, initial_state=state, output_final_state=True, normalize=normalize)
        return o, torch.cat([last[0].flatten(), last[1].flatten()]) if normalize else last

    def theirs(q, k, v):
        o, S_last = naive(q, k, v, torch.zeros(B, T, H), state=S if with_state else None)
        if not normalize:
            return o, S_last
        sums = k.cumsum(1) + (z if with_state else 0)
        o = o / ((K**-0.5 * q * sums).sum(-1, keepdim=True) + 1e-10)
        return o, torch.cat([S_last.flatten(), sums[:, -1:].flatten()])

    check(mine, theirs, (q, k, v), "qkv", torch.float64)
    narrow = tuple(x.float() for x in state) if isinstance(state, tuple) else None if state is None else state.float()
    expected, _ = reference(*(x.float() for x in (q, k, v)), initial_state=narrow, normalize=normalize)
    assert relative_error(mine(q.float(), k.float(), v.float())[0], expected) < 1e-5


def test_linear_attention_packed():
    q, k, v, _, _ = tensors(torch.float64, batch=1)
    q, k = q.abs() + 0.1, k.abs() + 0.1
    o, (S, z) = fla.chunk_linear_attn(q, k, v, output_final_state=True, cu_seqlens=torch.tensor([0, 9, T]))
    for s, part in enumerate((slice(0, 9), slice(9, T))):
        alone, (S_alone, z_alone) = fla.chunk_linear_attn(q[:, part], k[:, part], v[:, part], output_final_state=True)
        assert relative_error(o[:, part], alone) < 1e-12
        assert relative_error(S[s], S_alone[0]) < 1e-12
        assert relative_error(z[s], z_alone[0]) < 1e-12


def test_what_forward_keeps_is_handed_on(monkeypatch):
    q, k, v, _, _ = tensors()
    asked = []
    operator = fla.tfla.mlstm
    monkeypatch.setattr(
        fla.tfla, "mlstm", lambda *x, **options: asked.append(options["keep"]) or operator(*x, **options)
    )
    for options in ({}, {"keep": "states"}):
        fla.chunk_retention(q, k, v, **options)
    assert asked == ["denominators", "states"]


def test_no_final_state_unless_asked():
    q, k, v, g, _ = tensors()
    for function in (fla.chunk_simple_gla, fla.fused_recurrent_simple_gla):
        assert function(q, k, v, g)[1] is None
    assert fla.chunk_retention(q, k, v)[1] is None
    assert fla.chunk_linear_attn(q, k, v, normalize=False)[1] is None


q, k, v, g, state = tensors()
REFUSED = [
    (fla.chunk_simple_gla, {"g": g, "g_gamma": g[0, 0]}, ValueError, "g and g_gamma are both given"),
    (fla.chunk_simple_gla, {"g_gamma": torch.zeros(H + 1)}, ValueError, "g_gamma has shape"),
    (fla.chunk_simple_gla, {"g": g[:, 1:]}, ValueError, "f has shape"),
    (fla.chunk_simple_gla, {"head_first": False}, DeprecationWarning, "head_first is gone"),
    (fla.chunk_simple_gla, {"chunk_indices": 1}, TypeError, "chunk_indices is not an argument"),
    (fla.chunk_retention, {"g": g}, TypeError, "g is not an argument"),
    (fla.chunk_simple_gla, {"initial_state": state[:1]}, ValueError, "initial_state.C has shape"),
    (fla.chunk_simple_gla, {"cu_seqlens": torch.tensor([0, T])}, ValueError, "cu_seqlens is given with a batch of 2"),
    (fla.chunk_linear_attn, {"initial_state": (state, state), "normalize": False}, ValueError, "is a pair"),
    (fla.chunk_linear_attn, {"chunk_size": 64}, TypeError, "chunk_size"),
    (fla.chunk_retention, {"keep": "all"}, ValueError, "keep is 'all'"),
    (fla.fused_recurrent_simple_gla, {"chunk_size": 64}, TypeError, "tfla: chunk_size is not an argument"),
    (fla.fused_recurrent_retention, {"head_first": True}, DeprecationWarning, "head_first is gone from"),
]


@pytest.mark.parametrize(("function", "change", "error", "sentence"), REFUSED, ids=[row[3] for row in REFUSED])
def test_refused(function, change, error, sentence):
    with pytest.raises(error, match=sentence):
        function(q, k, v, **change)
