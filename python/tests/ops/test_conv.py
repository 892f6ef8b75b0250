"""tfla.causal_conv1d and its step against their formula in float64."""

import pytest
import torch

import tfla
from conv_reference import conv_by_parts, conv_reference
from tfla._torch import conv as library
from tfla.reference import relative_error

DOUBLE = torch.float64
BOUNDS = {torch.float32: 1e-6, DOUBLE: 1e-14, torch.bfloat16: 6e-3, torch.float16: 1e-3}
KINDS = {"plain": (None, False), "bias": (None, True), "silu": ("silu", False), "swish": ("swish", True)}


def make(batch=2, tokens=37, channels=11, width=4, dtype=torch.float32, bias=True, state=False, sequences=None):
    """x, weight, bias, state as they come to the operator."""
    numbers = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=numbers, dtype=DOUBLE).to(dtype)

    x, weight = normal(batch, tokens, channels), normal(channels, width)
    given_state = normal(sequences or batch, width - 1, channels) if state else None
    return x, weight, normal(channels) if bias else None, given_state


def leaves(given, dtype=None):
    return [None if x is None else x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in given]


def check(given, found, wanted, dtype, leaves_found=(), leaves_wanted=()):
    assert all(x.dtype == dtype and x.shape == y.shape for x, y in zip(found, wanted, strict=True))
    pairs = [*zip(found, wanted, strict=True)]
    if leaves_found:
        numbers = torch.Generator().manual_seed(9)
        heads = [torch.randn(y.shape, generator=numbers, dtype=DOUBLE).to(dtype) for y in wanted]
        torch.autograd.backward(found, heads)
        torch.autograd.backward(wanted, [x.double() for x in heads])
        rows = zip(leaves_found, leaves_wanted, strict=True)
        pairs += [(x.grad, y.grad) for x, y in rows if x is not None]
    for x, y in pairs:
        assert x.shape == y.shape and relative_error(x, y) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("layout", ["btd", "bdt", "bdt of btd"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, layout, dtype):
    activation, bias = KINDS[kind]
    x, weight, bias, state = make(dtype=dtype, bias=bias, state=True)
    if layout == "bdt":  # tokens side by side in memory
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    given, wanted = leaves((x, weight, bias, state)), leaves((x, weight, bias, state), DOUBLE)
    turned = layout != "btd"
    xs = [y.transpose(1, 2) if turned else y for y in (given[0], given[3])]
    found = tfla.causal_conv1d(
        xs[0], given[1], given[2], activation=activation, initial_state=xs[1], output_final_state=True,
        layout="bdt" if turned else "btd",
    )  # fmt: skip
    assert found[0].stride() == xs[0].stride()
    found = [y.transpose(1, 2) if turned else y for y in found]
    expected = conv_reference(*wanted[:3], silu=activation is not None, state=wanted[3])
    check(given, found, expected, dtype, given, wanted)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 70])
def test_widths_and_lengths(tokens, width):
    given = make(tokens=tokens, width=width, dtype=DOUBLE)[:3]
    found = tfla.causal_conv1d(*given, output_final_state=True)
    check(given, found, conv_reference(*given), DOUBLE)
    assert torch.equal(found[0], tfla.causal_conv1d(*given))


@pytest.mark.parametrize("state", [False, True])
def test_packed(state):
    bounds = [0, 2, 2, 20, 33]
    given = make(1, dtype=DOUBLE, state=state, sequences=4)
    mine, theirs = leaves(given), leaves(given)
    found = tfla.causal_conv1d(
        *mine[:3], activation="silu", initial_state=mine[3], output_final_state=True, cu_seqlens=torch.tensor(bounds)
    )
    wanted = conv_by_parts(theirs[0], bounds, *theirs[1:3], silu=True, state=theirs[3])
    check(given, found, wanted, DOUBLE, mine, theirs)
    assert not found[0][:, 33:].any() and not mine[0].grad[:, 33:].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_numbered(dtype):
    given = make(dtype=DOUBLE)[:3]
    mine, theirs = leaves(given), leaves(given)
    rows = ([0, 5, 6, 30], [0, 12, 33, 37])
    seq_idx = torch.full((2, 37), -1, dtype=dtype)
    for row, bounds in enumerate(rows):
        for number, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            seq_idx[row, a:b] = number + 3
    found = tfla.causal_conv1d(*mine, activation="silu", seq_idx=seq_idx)
    wanted = [
        conv_by_parts(theirs[0][row : row + 1], bounds, *theirs[1:], silu=True)[0] for row, bounds in enumerate(rows)
    ]
    check(given, [found], [torch.cat(wanted)], DOUBLE, mine, theirs)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("layout", ["btd", "bdt"])
def test_token_by_token(layout, dtype):
    x, weight, bias, state = make(tokens=6, dtype=dtype, state=True)
    wanted, wanted_state = conv_reference(*(y.double() for y in (x, weight, bias)), silu=True, state=state.double())
    kept = state.transpose(1, 2).contiguous() if layout == "bdt" else state.clone()
    address, order = kept.data_ptr(), (lambda y: y.transpose(1, 2)) if layout == "bdt" else (lambda y: y)
    parts = [tfla.causal_conv1d_step(x[:, t], kept, weight, bias, activation="silu", layout=layout) for t in range(3)]
    parts = [torch.stack(parts, dim=1)]
    parts += [order(tfla.causal_conv1d_step(order(x[:, 3:]), kept, weight, bias, activation="silu", layout=layout))]
    found = torch.cat(parts, dim=1)
    assert found.dtype == dtype and kept.data_ptr() == address
    assert relative_error(found, wanted) < BOUNDS[dtype] and torch.equal(order(kept).double(), wanted_state)


def test_ring_and_slots():
    x, weight, bias, _ = make(batch=3, tokens=9, dtype=DOUBLE)
    pool, wanted = torch.zeros(5, 5, 11, dtype=DOUBLE), conv_reference(x, weight, bias)[0]
    pool[0], slots = 7.0, torch.tensor([4, -1, 1])
    for t in range(9):
        done = torch.full((3,), t)
        y = tfla.causal_conv1d_step(x[:, t], pool, weight, bias, slots=slots, cache_seqlens=done)
        assert not y[1].any() and relative_error(y[[0, 2]], wanted[[0, 2], t]) < 1e-14
    assert torch.equal(pool[4], x[0][[5, 6, 7, 8, 4]]) and (pool[0] == 7).all() and not pool[[2, 3]].any()


def test_threads_do_not_change_a_bit():
    given, threads = make(tokens=900, channels=300)[:3], torch.get_num_threads()

    def both():
        mine = leaves(given)
        y = tfla.causal_conv1d(*mine, activation="silu")
        y.square().sum().backward()
        return y, *(x.grad for x in mine)

    try:
        torch.set_num_threads(1)
        one = both()
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(one, both(), strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["x", "state", "weight", "bias"])
def test_gradients_of_a_step_are_refused(name):
    x, weight, bias, state = make(tokens=1, state=True)
    given = {"x": x[:, 0], "state": state, "weight": weight, "bias": bias}
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="^tfla: causal_conv1d_step was given a tensor that requires a gradient"):
        tfla.causal_conv1d_step(**given)


def test_a_graph_notices_that_a_step_has_changed_its_state():
    x, weight, bias, state = make(tokens=1, state=True)
    factor = torch.ones((), requires_grad=True)
    product = (factor * state).sum()
    with torch.no_grad():
        tfla.causal_conv1d_step(x[:, 0], state, weight, bias)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


GIVEN = dict(zip(("x", "weight", "bias"), make(2, 4, 3)[:3], strict=True))
STATE = torch.zeros(2, 3, 3)


def conv(changes=None, **options):
    return lambda: tfla.causal_conv1d(**{**GIVEN, **(changes or {})}, **options)


def step(changes=None, **options):
    given = {**GIVEN, "x": GIVEN["x"][:, 0], "state": STATE, **(changes or {})}
    return lambda: tfla.causal_conv1d_step(**given, **options)


REFUSED = {
    "no x": (conv({"x": None}), "x is missing"),
    "no weight": (conv({"weight": None}), "weight is missing"),
    "no state in step": (step({"state": None}), "state is missing"),
    "rank of x": (conv({"x": GIVEN["x"][0]}), "x has 2 axes"),
    "rank of x in the other layout": (conv({"x": GIVEN["x"][0]}, layout="bdt"), "x has 2 axes"),
    "weight's shape": (conv({"weight": torch.zeros(4, 4)}), "weight has shape"),
    "weight's width": (conv({"weight": torch.zeros(3, 33)}), "weight has the width 33; it must be 1 to 32"),
    "bias's shape": (conv({"bias": torch.zeros(4)}), "bias has shape"),
    "integers": (conv({"x": GIVEN["x"].int()}), "x has dtype int32"),
    "devices": (conv({"bias": GIVEN["bias"].to("meta")}), "tensors are on cpu, meta"),
    "activation": (conv(activation="relu"), "activation is 'relu'; it must be None, 'silu' or 'swish'"),
    "unhashable activation": (conv(activation=["silu"]), r"activation is \['silu'\]"),
    "layout": (conv(layout="bhtd"), "layout is 'bhtd'; it must be 'btd' or 'bdt'"),
    "layout of a step": (step(layout="bhtd"), "layout is 'bhtd'"),
    "state's shape": (conv(initial_state=STATE[:, :2]), "initial_state has shape"),
    "packed batch": (conv(cu_seqlens=torch.tensor([0, 4])), "with a batch of 2"),
    "numbers' shape": (conv(seq_idx=torch.zeros(2, 3).int()), "seq_idx has shape"),
    "numbers with a state": (
        conv(seq_idx=torch.zeros(2, 4).int(), initial_state=STATE), "seq_idx is given with initial_state",
    ),
    "numbers that come back": (
        conv(seq_idx=torch.tensor([[0, 1, 0, 0]] * 2)), "seq_idx is 0 again at token 2 of row 0, 1 tokens after",
    ),
    "slot out of range": (step(slots=torch.tensor([0, 2])), r"slots\[1\] is 2"),
    "short state": (step({"state": STATE[:, :2]}), "state holds 2 inputs"),
    "negative count": (step(cache_seqlens=torch.tensor([0, -1])), r"cache_seqlens\[1\] is -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^tfla: .*{sentence}"):
        call()


def test_registered_operator_refuses_unknown_numbers():
    for activation in (2, -1, 256):
        with pytest.raises(ValueError, match=r"tfla: options.activation is not one of"):
            library.forward(*GIVEN.values(), None, None, None, activation)
