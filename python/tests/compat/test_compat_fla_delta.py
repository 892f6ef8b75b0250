"""The delta rule of tfla.compat.fla against its recurrence in float64 and flash-linear-attention's naive references."""

import ast
import inspect
from importlib.metadata import files
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from test_compat_fla import BOUNDS, check, leaves, published
from tfla.compat import fla
from tfla.reference import relative_error

B, T, H, K, V = 2, 45, 2, 8, 12
CHUNK, RECURRENT = fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule
PLAIN = (fla.chunk_delta_rule, fla.fused_recurrent_delta_rule)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(q, k, v, g, beta, scale=None, state=None):
    """(B,T,H,D) in float64, differentiated by PyTorch."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.double().repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    S = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3]) if state is None else state
    rows = []
    for t in range(v.shape[1]):
        S = torch.exp(g[:, t])[..., None, None] * S
        residual = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * residual)[:, :, None, :]
        rows.append(torch.einsum("bhk,bhkv->bhv", scale * q[:, t], S))
    return torch.stack(rows, 1), S


def tensors(dtype=torch.float32, batch=B, heads=H, seed=0):
    """q, k, v, g, beta, state. Keys of length 1 with beta below 1, as users have them, keep the state bounded."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(batch, T, H, K), unit(draw(batch, T, H, K)), draw(batch, T, heads, V)
    g, beta = F.logsigmoid(draw(batch, T, heads) + 2), torch.sigmoid(draw(batch, T, heads))
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    state = draw(batch, heads, K, V)
    return q.to(dtype), k.to(dtype), v.to(dtype), g.to(gates), beta.to(gates), state.to(gates)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("heads", [H, 2 * H])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_gated_delta_rule(function, dtype, heads, v_first):
    turn = (lambda x: x.transpose(-1, -2)) if v_first else (lambda x: x)

    def run(q, k, v, g, beta, state):
        o, last = function(
            q, k, v, g=g, beta=beta, scale=0.3, initial_state=turn(state), output_final_state=True,
            state_v_first=v_first,
        )  # fmt: skip
        return o, turn(last)

    expect = lambda q, k, v, g, beta, state: recurrence(q, k, v, g, beta, 0.3, state)  # noqa: E731
    check(run, expect, tensors(dtype, heads=heads), ("q", "k", "v", "g", "beta", "S"), dtype)


@pytest.mark.parametrize("function", PLAIN)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_delta_rule(function, dtype):
    q, k, v, g, beta, state = tensors(dtype)
    check(
        lambda q, k, v, beta, s: function(q, k, v, beta, initial_state=s, output_final_state=True),
        lambda q, k, v, beta, s: recurrence(q, k, v, torch.zeros_like(g).double(), beta, state=s),
        (q, k, v, beta, state), ("q", "k", "v", "beta", "S"), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_norms_and_gates_in_the_kernel(function, negative):
    """What a layer hands over as it comes out of its projections: gradients go through all of it."""
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    inputs = [draw(B, T, H, K), 3 * draw(B, T, H, K), draw(B, T, H, V), draw(B, T, H), draw(B, T, H), draw(H), draw(H)]
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def run(q, k, v, g, beta, A_log, dt_bias):
        return function(
            q, k, v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, allow_neg_eigval=negative, output_final_state=True,
            **options,
        )  # fmt: skip

    def expect(q, k, v, g, beta, A_log, dt_bias):
        decay = -A_log.exp() * F.softplus(g + dt_bias)
        return recurrence(unit(q), unit(k), v, decay, (2 if negative else 1) * beta.sigmoid())

    check(run, expect, inputs, ("q", "k", "v", "g", "beta", "A_log", "dt_bias"), torch.float64)
    q, k, v, g, beta, *_ = inputs
    without = function(q, k, v, g=-g.abs(), beta=beta.sigmoid(), A_log=inputs[5])[0]  # not read without the option
    assert relative_error(without, recurrence(q, k, v, -g.abs(), beta.sigmoid())[0]) < 1e-10


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_packed_sequences(function):
    bounds = [0, 7, 8, 30, T]
    q, k, v, g, beta, _ = tensors(torch.float64, batch=1)
    state = torch.randn(4, H, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def one_by_one(q, k, v, g, beta, state):
        parts = [
            recurrence(*(x[:, a:b] for x in (q, k, v, g, beta)), state=state[s : s + 1])
            for s, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])

    def run(q, k, v, g, beta, state):
        packing = torch.tensor(bounds)
        extra = {"cu_seqlens_cpu": packing, "chunk_size": 16} if function is CHUNK else {}
        return function(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, cu_seqlens=packing, **extra
        )

    check(run, one_by_one, (q, k, v, g, beta, state), ("q", "k", "v", "g", "beta", "S"), torch.float64)


def compared_with_published(run, theirs, inputs):
    """Values, final states and gradients, both in float32."""
    results = []
    for function in (run, theirs):
        given = leaves(*inputs)
        o, last = function(*given)
        torch.autograd.backward([o, last], [torch.ones_like(o), 0.1 * torch.ones_like(last)])
        results.append([o, last, *(x.grad for x in given)])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("name", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_published_naive_gated_delta_rule(function, name):
    q, k, v, g, beta, state = tensors()
    reference = getattr(published("gated_delta_rule/naive"), name)
    options = {"scale": 0.25, "output_final_state": True}
    compared_with_published(
        lambda q, k, v, g, beta, s: function(q, k, v, g=g, beta=beta, initial_state=s, **options),
        lambda q, k, v, g, beta, s: reference(q, k, v, g=g, beta=beta, initial_state=s, **options),
        (q, k, v, g, beta, state),
    )


@pytest.mark.parametrize("function", PLAIN)
def test_published_naive_delta_rule(function):
    q, k, v, _, beta, state = tensors()
    reference = published("delta_rule/naive").delta_rule_recurrence

    def theirs(q, k, v, beta, s):
        o, last = reference(*(x.transpose(1, 2) for x in (q, k, v, beta)), initial_state=s)
        return o.transpose(1, 2), last

    compared_with_published(
        lambda q, k, v, beta, s: function(q, k, v, beta, initial_state=s, output_final_state=True),
        theirs,
        (q, k, v, beta, state),
    )


def test_without_gates():
    """Neither decay nor beta: every token overwrites what the state says of its key."""
    q, k, v, _, _, _ = tensors(torch.float64, heads=2 * H)
    one, zero = torch.ones(v.shape[:3], dtype=torch.float64), torch.zeros(v.shape[:3], dtype=torch.float64)
    expected = recurrence(q, k, v, zero, one)[0]
    assert relative_error(RECURRENT(q, k, v)[0], expected) < 1e-10
    assert relative_error(fla.fused_recurrent_delta_rule(q, k, v)[0], expected) < 1e-10


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_token_by_token(function, v_first):
    """From state to state without gradients, which is another kernel; a state that is given stays as it is."""
    q, k, v, g, beta, state = (x[:, :9] if x.shape[1] == T else x for x in tensors(torch.float64, heads=2 * H))
    expected, expected_state = recurrence(q, k, v, g, beta, 0.3, state)
    rows, last, options = [], state.mT if v_first else state, {"scale": 0.3, "state_v_first": v_first}
    for t in range(9):
        token, before = (x[:, t : t + 1] for x in (q, k, v)), last.clone()
        o, after = function(
            *token, g=g[:, t : t + 1], beta=beta[:, t : t + 1], initial_state=last, output_final_state=True, **options
        )
        assert torch.equal(last, before)
        rows, last = [*rows, o], after
    assert relative_error(torch.cat(rows, 1), expected) < 1e-10
    assert relative_error(last.mT if v_first else last, expected_state) < 1e-10
    first = [x[:, :1] for x in (q, k, v)]
    alone = function(*first, g=g[:, :1], beta=beta[:, :1], use_qk_l2norm_in_kernel=True)
    assert alone[1] is None
    normed = recurrence(unit(first[0]), unit(first[1]), first[2], g[:, :1], beta[:, :1])[0]
    assert relative_error(alone[0], normed) < 1e-10


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_a_single_token_has_gradients(function):
    inputs = [x[:, :1] if x.shape[1] == T else x for x in tensors(torch.float64)]
    check(
        lambda q, k, v, g, beta, s: function(q, k, v, g=g, beta=beta, initial_state=s, output_final_state=True),
        lambda q, k, v, g, beta, s: recurrence(q, k, v, g, beta, state=s),
        inputs, ("q", "k", "v", "g", "beta", "S"), torch.float64,
    )  # fmt: skip


def test_any_strides():
    """As a convolution over (B,D,T) leaves them."""
    q, k, v, g, beta, _ = tensors(torch.float64)
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert torch.equal(CHUNK(*turned, g, beta)[0], CHUNK(q, k, v, g, beta)[0])


def test_states():
    """None unless asked for; any dtype in, float32 out; the one given is left as it is."""
    q, k, v, g, beta, state = tensors()
    for function in (CHUNK, RECURRENT):
        assert function(q, k, v, g=g, beta=beta)[1] is None
    assert all(function(q, k, v, beta)[1] is None for function in PLAIN)
    given = state.bfloat16()
    _, last = CHUNK(q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta, initial_state=given, output_final_state=True)
    assert last.dtype == torch.float32 and torch.equal(given, state.bfloat16())
    with pytest.warns(DeprecationWarning, match="now named state_v_first"):
        _, turned = CHUNK(q, k, v, g, beta, output_final_state=True, transpose_state_layout=True)
    assert turned.shape == (B, H, V, K)


def test_signatures_are_those_published():
    """By their files: the names of arguments, their order and defaults."""
    homes = {
        CHUNK: "gated_delta_rule/chunk", RECURRENT: "gated_delta_rule/fused_recurrent", PLAIN[0]: "delta_rule/chunk",
        PLAIN[1]: "delta_rule/fused_recurrent",
    }  # fmt: skip
    for function, home in homes.items():
        path = next(Path(x.locate()) for x in files("fla-core") if str(x) == f"fla/ops/{home}.py")
        tree = ast.parse(path.read_text()).body
        (found,) = [x for x in tree if isinstance(x, ast.FunctionDef) and x.name == function.__name__]
        defaults = [ast.literal_eval(x) for x in found.args.defaults]
        parameters = inspect.signature(function).parameters.values()
        mine = [x for x in parameters if x.kind is not x.VAR_KEYWORD]
        assert [x.name for x in mine] == [x.arg for x in found.args.args]
        assert [x.default for x in mine if x.default is not x.empty] == defaults
        assert (len(mine) < len(parameters)) == (found.args.kwarg is not None)


q, k, v, g, beta, state = tensors()
GATE = {"use_gate_in_kernel": True}
REFUSED = [
    (CHUNK, {"g": g, "beta": beta, "cp_context": object()}, ValueError, "cp_context is given"),
    (CHUNK, {"g": g, "beta": beta, "allow_neg_eigval": True}, ValueError, "allow_neg_eigval is True without"),
    (CHUNK, {"g": g, "beta": beta, "head_first": False}, DeprecationWarning, "head_first is gone"),
    (CHUNK, {"g": g, "beta": beta, "chunk_indices": 1}, TypeError, "chunk_indices is not an argument"),
    (CHUNK, {"g": g, "beta": beta, **GATE}, ValueError, "A_log is missing"),
    (
        CHUNK,
        {"g": g, "beta": beta, "transpose_state_layout": True, "state_v_first": True},
        ValueError,
        "are both given",
    ),
    (CHUNK, {"g": g[:, 1:], "beta": beta}, ValueError, "g has shape"),
    (CHUNK, {"g": g, "beta": beta, "cu_seqlens": torch.tensor([0, T])}, ValueError, "cu_seqlens is given with a batch"),
    (RECURRENT, {"g": g, "gk": v}, ValueError, "gk is given"),
    (RECURRENT, {"g": g, "gv": v}, ValueError, "gv is given"),
    (RECURRENT, {**GATE, "A_log": g[0, 0]}, ValueError, "g is missing"),
    (RECURRENT, {"g": g, "beta": beta, "chunk_size": 64}, TypeError, "chunk_size is not an argument"),
    (RECURRENT, {"g": g, "beta": beta, "head_first": True}, DeprecationWarning, "head_first is gone"),
    (PLAIN[0], {"beta": beta, "g": g}, TypeError, "g is not an argument"),
    (PLAIN[0], {"beta": beta, "initial_state": state[:1]}, ValueError, "initial_state has shape"),
    (PLAIN[1], {"beta": v}, ValueError, "beta has 4 axes"),
]


@pytest.mark.parametrize(("function", "change", "error", "sentence"), REFUSED, ids=[row[3] for row in REFUSED])
def test_refused(function, change, error, sentence):
    with pytest.raises(error, match=f"^tfla: .*{sentence}"):
        function(q, k, v, **change)
