"""tfla.ssd and tfla.ssd_step against the recurrence in float64, token by token."""

import pickle

import pytest
import torch

import tfla
import tfla.state_space
from ssd_inputs import BATCH, GROUPS, HEADS, TOKENS, N, P, at, extras, leaves, naive, tensors, wide
from tfla.reference import BOUNDS, relative_error

OPTIONS = [(), ("D",), ("D2", "z", "dt_bias"), ("state", "z"), ("D", "z", "dt_bias", "state", "limit")]


@pytest.fixture(autouse=True, params=["kernels", "composed"])
def path(request, monkeypatch):
    """The kernels of the operator, or what tensors without such are computed by, those of a GPU among them."""
    if request.param == "composed":
        monkeypatch.setattr(tfla.state_space, "_has_kernels", lambda x: False)


def renamed(given):
    return {("initial_state" if name == "state" else name): x for name, x in given.items()}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("names", OPTIONS, ids=str)
def test_values_and_gradients(names, dtype):
    given, limit = tensors(dtype) | extras(dtype, names), (0.1, 1.5) if "limit" in names else (0.0, float("inf"))
    mine, wanted = leaves(given), leaves(given, torch.float64)
    options = {"dt_softplus": True, "dt_limit": limit, "chunk_size": 16}
    y, S = tfla.ssd(**renamed(mine), output_final_state=True, **options)
    expected, expected_S = naive(**wanted, softplus=True, limit=limit)
    assert y.dtype == dtype and S.dtype == wide(dtype) and S.shape == (BATCH, HEADS, P, N)
    value, grad = BOUNDS[dtype]
    roundings = 2 if "D" in given or "z" in given else 1
    assert relative_error(y, expected) < roundings * value
    assert relative_error(S, expected_S) < BOUNDS[wide(dtype)][0]
    generator = torch.Generator().manual_seed(2)
    dy, dS = (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (y, S))
    torch.autograd.backward([y, S], [dy, dS])
    torch.autograd.backward([expected, expected_S], [dy.double(), dS.double()])
    for name, x in mine.items():
        assert relative_error(x.grad, wanted[name].grad) < roundings * grad, name
    alone = tfla.ssd(**renamed(given), **options)
    assert torch.equal(alone, y)


def test_dtypes_of_gates_are_free():
    given = tensors(torch.float32) | extras(torch.float32, ("D", "dt_bias", "state"))
    narrow = given | {name: given[name].bfloat16() for name in ("dt", "A", "D", "dt_bias", "state")}
    exact = {name: x.double() for name, x in narrow.items()}
    y = tfla.ssd(**renamed(narrow), dt_softplus=True)
    assert relative_error(y, naive(**exact, softplus=True)[0]) < BOUNDS[torch.float32][0]


def test_padding_behind_packed_sequences():
    """Rows of y and of gradients are 0 there, whatever D says and whatever lies there."""
    given = tensors(torch.float64, batch=1) | extras(torch.float64, ("D", "z", "dt_bias"), batch=1)
    for name in ("x", "dt", "B", "C", "z"):
        given[name][:, 30:] = float("nan")
    given = leaves(given)
    bounds = torch.tensor([0, 5, 5, 30], dtype=torch.int32)
    y, S = tfla.ssd(**given, dt_softplus=True, cu_seqlens=bounds, output_final_state=True)
    assert not y[:, 30:].any() and not S[1].any() and S.shape == (3, HEADS, P, N)
    expected, last = naive(**at(given, slice(5, 30)), softplus=True)
    assert relative_error(y[:, 5:30], expected) < 1e-10 and relative_error(S[2:], last) < 1e-10
    y.square().sum().backward()
    assert all(not given[name].grad[:, 30:].any() for name in ("x", "dt", "B", "C", "z"))
    assert all(x.grad.isfinite().all() for x in given.values())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
@pytest.mark.parametrize("first", [0, 2], ids=["goes-on", "starts-afresh"])
def test_numbers_of_sequences(first, dtype):
    """A state is that of number 0; a number that comes back is another sequence."""
    given = tensors(torch.float64) | extras(torch.float64, ("D", "dt_bias", "state"))
    numbers = torch.tensor([first] * 5 + [7] * 9 + [-1] * 3 + [first] * 20 + [9] * 4, dtype=dtype).expand(BATCH, -1)
    mine, wanted = leaves(given), leaves(given)
    y, S = tfla.ssd(**renamed(mine), dt_softplus=True, seq_idx=numbers, output_final_state=True)
    expected, last = naive(**wanted, softplus=True, seq_idx=numbers)
    assert relative_error(y, expected) < 1e-10 and relative_error(S, last) < 1e-10
    (y.square().sum() + S.sum()).backward()
    (expected.square().sum() + last.sum()).backward()
    for name, x in mine.items():
        error = x.grad.norm() if not wanted[name].grad.any() else relative_error(x.grad, wanted[name].grad)
        assert error < 1e-9, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("edge", [0.0, 0.5])
def test_time_steps_at_a_limit_have_a_slope(edge, dtype):
    """As `clamp` has it, also where nothing is written."""
    given = tensors(dtype, positive_dt=True)
    given["dt"][:, ::3] = edge
    mine, wanted, limit = leaves(given), leaves(given, torch.float64), (0.0, 0.5 if edge else float("inf"))
    y, expected = tfla.ssd(**mine, dt_limit=limit), naive(**wanted, limit=limit)[0]
    y.square().sum().backward()
    expected.square().sum().backward()
    value, grad = BOUNDS[dtype]
    assert relative_error(y, expected) < value
    assert all(relative_error(x.grad, wanted[name].grad) < grad for name, x in mine.items())


def test_slices_of_one_projection():
    """As a layer has them: nothing is contiguous but the last axis."""
    whole = torch.randn(BATCH, TOKENS, HEADS * P + 2 * GROUPS * N + HEADS)
    x, B, C, dt = whole.split([HEADS * P, GROUPS * N, GROUPS * N, HEADS], -1)
    given = {
        "x": x.unflatten(-1, (HEADS, P)), "dt": dt, "A": -torch.rand(HEADS),
        "B": B.unflatten(-1, (GROUPS, N)), "C": C.unflatten(-1, (GROUPS, N)),
    }  # fmt: skip
    expected, _ = naive(**{name: t.double() for name, t in given.items()}, softplus=True)
    assert relative_error(tfla.ssd(**given, dt_softplus=True), expected) < BOUNDS[torch.float32][0]


def test_gradients_through_the_last_state_alone():
    given = tensors(torch.float64) | extras(torch.float64, ("D", "z", "state"))
    mine, wanted = leaves(given), leaves(given)
    tfla.ssd(**renamed(mine), dt_softplus=True, output_final_state=True)[1].square().sum().backward()
    naive(**wanted, softplus=True)[1].square().sum().backward()
    for name in ("x", "dt", "A", "B", "state"):
        assert relative_error(mine[name].grad, wanted[name].grad) < 1e-10, name
    assert not any(mine[name].grad is not None and mine[name].grad.any() for name in ("C", "D", "z"))


def test_the_operator_without_what_forward_keeps():
    """As `torch.ops` has it: backward computes y before silu(z) again."""
    given = tensors(torch.float64) | extras(torch.float64, ("D", "z"))
    mine, wanted = leaves(given), leaves(given)
    y, _, kept = torch.ops.tfla.ssd(**mine, dt_softplus=True)
    assert kept.numel() == 0
    y.square().sum().backward()
    naive(**wanted, softplus=True)[0].square().sum().backward()
    assert all(relative_error(x.grad, wanted[name].grad) < 1e-10 for name, x in mine.items())


def test_autocast():
    given = tensors(torch.float32) | extras(torch.float32, ("D", "z"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, S = tfla.ssd(**given, dt_softplus=True, output_final_state=True)
        step = tfla.ssd_step(**at(given, 0), state=torch.zeros(BATCH, HEADS, P, N), dt_softplus=True)
    assert y.dtype == step.dtype == torch.bfloat16 and S.dtype == torch.float32
    assert relative_error(y, tfla.ssd(**given, dt_softplus=True)) < 0.02
    assert relative_error(step, y[:, 0]) < 2.0**-7


def summed(x, dt, A, B, C, D, z, state):
    y, S = tfla.ssd(x, dt, A, B, C, D=D, z=z, dt_softplus=True, initial_state=state, output_final_state=True)
    return y.square().sum() + S.square().sum()


def test_compiles_whole():
    given = tensors(torch.float64) | extras(torch.float64, ("D", "z", "state"))
    compiled, grads = torch.compile(summed, fullgraph=True, backend="aot_eager"), []
    for run in (summed, compiled):
        mine = leaves(given)
        run(**mine).backward()
        grads.append([x.grad for x in mine.values()])
    assert all(relative_error(a, b) < 1e-10 for a, b in zip(*grads, strict=True))


def test_step_compiles_whole():
    given = tensors(torch.float32) | extras(torch.float32, ("D",))
    token, pool, slots = at(given, 0), torch.randn(4, HEADS, P, N), torch.tensor([2, -1])

    def step(state):
        return tfla.ssd_step(**token, state=state, slots=slots, dt_softplus=True)

    mine, theirs = pool.clone(), pool.clone()
    with torch.no_grad():
        y = torch.compile(step, fullgraph=True, backend="aot_eager")(mine)
        assert relative_error(y, step(theirs)) < 1e-6 and relative_error(mine, theirs) < 1e-6


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", OPTIONS[1:3] + OPTIONS[4:], ids=str)
def test_steps_are_the_sequence(names, state_dtype):
    given, limit = tensors(torch.float64) | extras(torch.float64, names), (0.1, 1.5) if "limit" in names else (0.0, 9.0)
    first = given.pop("state", torch.zeros(BATCH, HEADS, P, N, dtype=torch.float64)).to(state_dtype)
    options, before = {"dt_softplus": True, "dt_limit": limit}, first.clone()
    expected, last = naive(**given, state=first.double(), softplus=True, limit=limit)
    rows = [tfla.ssd_step(**at(given, t), state=first, **options) for t in range(30)]
    rows.append(tfla.ssd_step(**at(given, slice(30, None)), state=first, **options))
    y = torch.cat([torch.stack(rows[:-1], 1), rows[-1]], 1)
    # A state of fewer bits is rounded after every step; its decay forgets old roundings.
    bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 3e-2}[state_dtype]
    assert relative_error(y, expected) < bound and relative_error(first, last) < bound
    assert first.dtype == state_dtype and not torch.equal(first, before)


def one_token(dtype=torch.float32, rows=3, names=("D", "z")):
    return at(tensors(dtype, batch=rows) | extras(dtype, names, batch=rows), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [[3, -1, 0], [0, -1, 3], [-1, 1, 2], [-1, -1, -1], [2, 0, 4]], ids=str)
def test_slots(slots, dtype):
    given, pool = one_token(), torch.randn(5, HEADS, P, N).to(dtype)
    before, used = pool.clone(), [n for n, slot in enumerate(slots) if slot >= 0]
    own = pool[[slots[n] for n in used]].clone()
    y = tfla.ssd_step(**given, state=pool, slots=torch.tensor(slots, dtype=torch.int32), dt_softplus=True)
    assert not y[[n for n in range(3) if n not in used]].any()
    others = [n for n in range(5) if n not in slots]
    assert torch.equal(pool[others], before[others])
    if used:
        rows = {name: x if name in ("A", "D") else x[used] for name, x in given.items()}
        assert relative_error(y[used], tfla.ssd_step(**rows, state=own, dt_softplus=True)) < 1e-6
        # Another number of rows may round gates otherwise, and so a state of 16 bits here and there.
        assert relative_error(pool[[slots[n] for n in used]], own) < (1e-6 if dtype == torch.float32 else 2.0**-10)


def test_a_graph_does_not_go_on_from_a_state_that_was_updated():
    given, state = one_token(), torch.randn(3, HEADS, P, N, requires_grad=True)
    value = (state * state).sum()
    with torch.no_grad():
        tfla.ssd_step(**given, state=state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_step_refuses_gradients():
    given = one_token()
    given["x"].requires_grad_()
    with pytest.raises(RuntimeError, match="^tfla: ssd_step was given a tensor that requires a gradient"):
        tfla.ssd_step(**given, state=torch.zeros(3, HEADS, P, N))


def test_names_of_the_package_are_functions():
    """Whichever is asked for first, and through pickle."""
    assert (
        pickle.loads(pickle.dumps(tfla.ssd_step)) is tfla.ssd_step and pickle.loads(pickle.dumps(tfla.ssd)) is tfla.ssd
    )


WRONG = torch.zeros(HEADS + 1)
REFUSED = [
    ({"x": torch.zeros(TOKENS, HEADS, P)}, r"x has shape \(41, 4, 6\); it must be \(B,T,H,P\)"),
    ({"dt": torch.zeros(BATCH, TOKENS, 1)}, r"dt has shape \(2, 41, 1\); it must be \(2, 41, 4\)"),
    ({"dt": torch.zeros(BATCH, TOKENS, HEADS, dtype=torch.int64)}, "dt is torch.int64"),
    ({"A": WRONG}, r"A has shape \(5,\); it must be \(4,\)"),
    ({"B": torch.zeros(BATCH, TOKENS, 3, N)}, r"B has shape \(2, 41, 3, 8\); it must be \(2,41,G,N\), G a divisor of"),
    ({"B": torch.zeros(BATCH, 1, GROUPS, N)}, "B has shape"),
    ({"C": torch.zeros(BATCH, TOKENS, GROUPS, N + 1)}, r"C has shape \(2, 41, 2, 9\); it must be \(2, 41, 2, 8\)"),
    ({"B": torch.zeros(BATCH, TOKENS, GROUPS, N).double()}, "B is torch.float64; it must be torch.float32"),
    ({"D": torch.zeros(HEADS, P + 1)}, r"D has shape \(4, 7\); it must be \(4,\) or \(4, 6\)"),
    ({"z": torch.zeros(BATCH, TOKENS, HEADS)}, "z has shape"),
    ({"dt_bias": WRONG}, "dt_bias has shape"),
    ({"dt_limit": (-1.0, 1.0)}, "dt_limit is"),
    ({"dt_limit": (2.0, 1.0)}, "dt_limit is"),
    ({"seq_idx": torch.zeros(TOKENS)}, "seq_idx has shape"),
    ({"seq_idx": torch.zeros(BATCH, TOKENS)}, "seq_idx is torch.float32; it must be of an integer dtype"),
    ({"cu_seqlens": torch.zeros(1, 2)}, "cu_seqlens has shape"),
    ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens has shape \(0,\); it must be \(sequences"),
    ({"cu_seqlens": torch.tensor([0, TOKENS])}, "cu_seqlens is given with a batch of 2"),
    ({"chunk_size": 0}, "chunk_size is 0"),
    ({"initial_state": torch.zeros(BATCH, HEADS, N, P)}, r"initial_state has shape .*; it must be \(2, 4, 6, 8\)"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(change, sentence):
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        tfla.ssd(**(tensors(torch.float32) | change))


STEP_REFUSED = [
    ({"x": torch.zeros(3, P)}, r"x has shape \(3, 6\); it must be \(B,H,P\) or \(B,T,H,P\)"),
    ({"dt": torch.zeros(3, 1)}, "dt has shape"),
    ({"state": torch.zeros(2, HEADS, P, N)}, r"state has shape \(2, 4, 6, 8\); it must be \(3, 4, 6, 8\)"),
    ({"state": torch.zeros(3, HEADS, P, N, dtype=torch.int32)}, "state is torch.int32"),
    ({"slots": torch.tensor([0, 1])}, "slots has shape"),
    ({"slots": torch.zeros(3)}, "slots has shape"),
    ({"slots": torch.tensor([0, 1, 3])}, r"slots is \[0, 1, 3\]; each must be -1 or below 3"),
    ({"slots": torch.tensor([0, 1, -2])}, "slots is"),
    ({"slots": torch.tensor([0, 1, 1])}, "each slot may be given once"),
]


@pytest.mark.parametrize(("change", "sentence"), STEP_REFUSED, ids=[sentence for _, sentence in STEP_REFUSED])
def test_step_refused(change, sentence):
    with pytest.raises(ValueError, match=f"^tfla: .*{sentence}"):
        tfla.ssd_step(**(one_token() | {"state": torch.zeros(3, HEADS, P, N)} | change))
