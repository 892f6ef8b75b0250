"""tfla.delta_rule against the recurrence in float64: values, states, gradients, and what is refused."""

import pytest
import torch

import tfla
from delta_inputs import PER_TOKEN, head_first, leaves, make_delta, make_delta_state, mapped
from tfla._torch import delta as library
from tfla.reference import BOUNDS, delta_recurrence, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

# What is given, and options.
VARIANTS = [
    ({"g": False}, {}),
    ({}, {}),
    ({"A_log": True}, {}),
    ({"A_log": True, "dt_bias": True}, {}),
    ({"raw_beta": True}, {"write": "sigmoid"}),
    ({"raw_beta": True}, {"write": "twice_sigmoid"}),
    ({}, {"normalize_qk": True, "qk_scale": 0.5}),
    (
        {"A_log": True, "dt_bias": True, "raw_beta": True},
        {"write": "twice_sigmoid", "normalize_qk": True, "qk_scale": 2.0},
    ),
]


def state_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(given, options, *, state=None, reference=delta_recurrence, layout="bthd", **extra) -> None:
    """Values, last state and all gradients of one call, with random gradients of h and of the last state."""
    dtype = given["q"].dtype
    order = head_first if layout == "bhtd" else lambda x: x
    mine, wanted = leaves(given), leaves(given, torch.float64)
    my_state = None if state is None else state.clone().requires_grad_()
    wanted_state = None if state is None else state.double().requires_grad_()
    h, last = tfla.delta_rule(
        **mapped(order, mine), initial_state=my_state, output_final_state=True, layout=layout, **options, **extra
    )
    h = order(h)
    reference_h, reference_last = reference(**wanted, state=wanted_state, **options)
    dh, dlast = torch.randn_like(reference_h).to(dtype), torch.randn_like(last)
    torch.autograd.backward([h, last], [dh, dlast])
    torch.autograd.backward([reference_h, reference_last], [dh.double(), dlast.double()])

    assert h.dtype == dtype and h.shape == reference_h.shape
    assert last.dtype == state_dtype(dtype) and last.shape == reference_last.shape
    arithmetic = BOUNDS[state_dtype(dtype)]
    errors = {"h": relative_error(h, reference_h) / BOUNDS[dtype][0]}
    errors["last state"] = relative_error(last, reference_last) / arithmetic[0]
    for name, x in mine.items():
        assert x.grad.dtype == x.dtype and x.grad.shape == x.shape
        errors[f"d{name}"] = relative_error(x.grad, wanted[name].grad) / max(BOUNDS[x.dtype][1], arithmetic[1])
    if state is not None:
        errors["dstate"] = relative_error(my_state.grad, wanted_state.grad) / arithmetic[1]
    bad = {name: error for name, error in errors.items() if not error < 1}
    assert not bad, f"errors in units of their bounds: {bad}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("inputs", "options"), VARIANTS, ids=str)
def test_variants(inputs, options, dtype):
    check(make_delta(dtype=dtype, **inputs), options, state=make_delta_state(dtype=state_dtype(dtype)))


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize(("inputs", "options"), [VARIANTS[0], VARIANTS[-1]], ids=str)
def test_layouts(inputs, options, layout):
    check(make_delta(tokens=70, **inputs), options, layout=layout)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (3, 2, 1, 5, 3), (1, 129, 3, 17, 9), (2, 200, 2, 16, 32)], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 1, 16, 1000])
def test_shapes_and_chunks(shape, chunk_size):
    check(make_delta(*shape, qk_heads=None), {}, chunk_size=chunk_size)


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_gates_in_a_dtype_of_their_own(gate_dtype):
    given = make_delta(dtype=torch.bfloat16, gate_dtype=gate_dtype, A_log=True, dt_bias=True, raw_beta=True)
    check(given, {"write": "sigmoid"})


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("padding", [0, 7])
def test_packed_sequences(padding, layout, index_dtype):
    bounds = [0, 5, 5, 29, 64]

    def packed(*, state, A_log, dt_bias, **inputs):
        """The reference, sequence by sequence, and zeros for what follows the last."""
        parts = []
        for s, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            rows = mapped(lambda x, rows=slice(begin, end): x[:, rows], inputs)
            parts.append(delta_recurrence(**rows, A_log=A_log, dt_bias=dt_bias, state=state[s : s + 1]))
        h, states = zip(*parts, strict=True)
        rest = h[0].new_zeros(1, padding, *h[0].shape[2:])
        # Gradients of what has none are 0, which autograd says only of what takes part.
        nothing = 0.0 * sum(x.sum() for x in inputs.values())
        return torch.cat([*h, rest], dim=1) + nothing, torch.cat(states)

    given = make_delta(1, 64 + padding, A_log=True, dt_bias=True)
    state, cu_seqlens = make_delta_state(4), torch.tensor(bounds, dtype=index_dtype)
    check(given, {}, state=state, reference=packed, layout=layout, cu_seqlens=cu_seqlens)
    rest = slice(64, None)
    mine = leaves(given)
    h = tfla.delta_rule(**mine, cu_seqlens=cu_seqlens)
    h.sum().backward()
    assert not h[:, rest].any() and not any(mine[name].grad[:, rest].any() for name in PER_TOKEN)


def test_slices_of_a_fused_projection():
    """q, k, v as views of one tensor, beta and g of another; gradients come back into them."""
    given = make_delta(qk_heads=None)
    fused = torch.cat([given["q"], given["k"], given["v"]], dim=-1)
    gates = torch.stack([given["beta"], given["g"]], dim=-1)
    found = []
    for function, dtype in ((tfla.delta_rule, torch.float32), (lambda *x: delta_recurrence(*x)[0], torch.float64)):
        one, two = (x.detach().to(dtype, copy=True).requires_grad_() for x in (fused, gates))
        function(*one.split([8, 8, 12], dim=-1), *two.unbind(-1)).square().sum().backward()
        found.append((one.grad, two.grad))
    for x, y in zip(*found, strict=True):
        assert relative_error(x, y) < BOUNDS[torch.float32][1]


def test_gradients_of_any_strides():
    """As sums, expansions and transpositions hand them back."""
    for dh in (
        torch.ones(()).expand(2, 37, 4, 12),
        torch.randn(12).expand(2, 37, 4, 12),
        torch.randn(2, 1, 4, 1).expand(2, 37, 4, 12),
        torch.randn(2, 37, 12, 4).transpose(2, 3),
    ):
        given, copied = leaves(make_delta()), leaves(make_delta())
        tfla.delta_rule(**given).backward(dh)
        tfla.delta_rule(**copied).backward(dh.contiguous())
        assert all(torch.equal(given[name].grad, copied[name].grad) for name in given)
    given, copied = make_delta_state(), make_delta_state()
    dlast = torch.randn(2, 4, 12, 8).transpose(2, 3)
    for state, gradient in ((given.requires_grad_(), dlast), (copied.requires_grad_(), dlast.contiguous())):
        tfla.delta_rule(**make_delta(), initial_state=state, output_final_state=True)[1].backward(gradient)
    assert torch.equal(given.grad, copied.grad)


def test_no_tokens_leaves_the_state():
    state = make_delta_state()
    h, last = tfla.delta_rule(**make_delta(tokens=0), initial_state=state, output_final_state=True)
    assert h.shape == (2, 0, 4, 12) and torch.equal(last, state)


@pytest.mark.parametrize("used", ["h", "state"])
def test_one_result_is_used(used):
    given, wanted = leaves(make_delta()), leaves(make_delta(), torch.float64)
    part = 0 if used == "h" else 1
    tfla.delta_rule(**given, output_final_state=True)[part].square().sum().backward()
    delta_recurrence(**wanted)[part].square().sum().backward()
    for name, x in given.items():
        y = wanted[name].grad
        assert relative_error(x.grad, torch.zeros_like(x) if y is None else y) < BOUNDS[torch.float32][1], name


def test_without_the_last_state_nothing_else_changes():
    short, long = leaves(make_delta(A_log=True)), leaves(make_delta(A_log=True))
    h, (other, _) = tfla.delta_rule(**short), tfla.delta_rule(**long, output_final_state=True)
    assert torch.equal(h, other)
    for x in (h, other):
        x.square().sum().backward()
    assert all(torch.equal(short[name].grad, long[name].grad) for name in short)


def test_a_reset_begins_afresh():
    """g of minus infinity forgets all before it, and hands no gradient back."""
    given = make_delta()
    given["g"][:, 20] = -torch.inf
    check(given, {}, state=make_delta_state())
    after = mapped(lambda x: x[:, 20:], given)
    assert relative_error(tfla.delta_rule(**given)[:, 20:], delta_recurrence(**after)[0]) < BOUNDS[torch.float32][0]


def test_threads_do_not_change_a_bit():
    given = make_delta(1, 500, 1, qk_heads=None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = tfla.delta_rule(**given)
        torch.set_num_threads(2)
        assert torch.equal(one, tfla.delta_rule(**given))
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- steps
def token(given, t):
    return mapped(lambda x: x[:, t], given)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("inputs", "options"), VARIANTS, ids=str)
def test_token_by_token(inputs, options, dtype):
    given, state = make_delta(3, 5, dtype=dtype, **inputs), make_delta_state(3, dtype=state_dtype(dtype))
    wanted, wanted_state = delta_recurrence(**given, state=state.clone(), **options)
    address = state.data_ptr()
    h = torch.stack([tfla.delta_rule_step(**token(given, t), state=state, **options) for t in range(5)], dim=1)
    assert h.dtype == dtype and h.shape == wanted.shape and state.data_ptr() == address
    assert relative_error(h, wanted) < BOUNDS[dtype][0]
    assert relative_error(state, wanted_state) < BOUNDS[state.dtype][0]


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_several_tokens(layout):
    given, state = make_delta(3, 4, A_log=True, dt_bias=True), make_delta_state(3)
    wanted, wanted_state = delta_recurrence(**given, state=state.clone())
    order = head_first if layout == "bhtd" else lambda x: x
    h = tfla.delta_rule_step(**mapped(order, given), state=state, layout=layout)
    assert relative_error(order(h), wanted) < 1e-5
    assert relative_error(state, wanted_state) < 1e-5


def test_one_token_has_no_layout():
    """Without an axis of tokens both are (B,H,D)."""
    one, other = make_delta_state(), make_delta_state()
    given = token(make_delta(), 0)
    h = tfla.delta_rule_step(**given, state=one)
    assert torch.equal(h, tfla.delta_rule_step(**given, state=other, layout="bhtd")) and torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_touch_their_states_alone(dtype):
    """A row of slot -1 is padding."""
    given, pool = token(make_delta(3), 0), make_delta_state(6)
    before = pool.clone()
    h = tfla.delta_rule_step(**given, state=pool, slots=torch.tensor([4, -1, 1], dtype=dtype))
    rows = mapped(lambda x: x[[0, 2]][:, None], given)
    wanted, after = delta_recurrence(**rows, state=before[[4, 1]])
    assert relative_error(h[[0, 2]], wanted[:, 0]) < 1e-5 and not h[1].any()
    assert relative_error(pool[[4, 1]], after) < 1e-5
    assert torch.equal(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


def test_prefill_then_decode_is_the_whole_sequence():
    whole = make_delta(tokens=30)
    h, state = tfla.delta_rule(**mapped(lambda x: x[:, :23], whole), output_final_state=True)
    rest = [tfla.delta_rule_step(**token(whole, t), state=state) for t in range(23, 30)]
    assert relative_error(torch.cat([h, torch.stack(rest, dim=1)], dim=1), tfla.delta_rule(**whole)) < 1e-5


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "A_log", "dt_bias", "state"])
def test_gradients_of_a_step_are_refused(name):
    given = token(make_delta(A_log=True, dt_bias=True), 0) | {"state": make_delta_state()}
    given[name].requires_grad_()
    with pytest.raises(RuntimeError, match="^tfla: delta_rule_step was given a tensor that requires a gradient"):
        tfla.delta_rule_step(**given)
    with torch.inference_mode():
        tfla.delta_rule_step(**given | {"state": make_delta_state()})


def test_a_graph_notices_that_a_step_has_changed_its_state():
    state, x = make_delta_state(), torch.ones((), requires_grad=True)
    product = (x * state).sum()
    with torch.no_grad():
        tfla.delta_rule_step(**token(make_delta(), 0), state=state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# ---------------------------------------------------------------- what is refused
GIVEN = make_delta(2, 4, 2, 8, 12, qk_heads=None, A_log=True, dt_bias=True)
STATE = make_delta_state(2, 2)
PACKED = {name: x[:1] if name in PER_TOKEN else x for name, x in GIVEN.items()}


def rule(changes=None, given=GIVEN, **options):
    return lambda: tfla.delta_rule(**{**given, **(changes or {})}, **options)


def one_step(changes=None, given=GIVEN, state=STATE, **options):
    return lambda: tfla.delta_rule_step(**{**given, **(changes or {})}, state=state, **options)


REFUSED = {
    "no q": (rule({"q": None}), "q is missing"),
    "no k for a gradient": (rule({"k": None}, leaves(GIVEN)), "k is missing"),
    "no beta": (rule({"beta": None}), "beta is missing"),
    "no v for a state": (rule({"v": None}, output_final_state=True), "v is missing"),
    "no beta in step": (one_step({"beta": None}), "beta is missing"),
    "no state in step": (one_step(state=None), "state is missing"),
    "A_log without g": (rule({"g": None}), "A_log"),
    "dt_bias without A_log": (rule({"A_log": None}), "dt_bias"),
    "rank of q": (rule({"q": GIVEN["q"][0]}), "q has 3 axes"),
    "five axes": (rule({"q": GIVEN["q"][None]}), "q has 5 axes"),
    "k's shape": (rule({"k": GIVEN["k"][..., :4]}), "k has shape"),
    "beta's shape": (rule({"beta": GIVEN["beta"][:, :3]}), "beta has shape"),
    "g's shape": (rule({"g": GIVEN["g"][:, :, :1]}), "g has shape"),
    "A_log's shape": (rule({"A_log": torch.zeros(3)}), "A_log has shape"),
    "dt_bias's shape": (rule({"dt_bias": torch.zeros(3)}), "dt_bias has shape"),
    "heads": (rule({"v": torch.randn(2, 4, 3, 12)}), "v has 3 heads and q has 2"),
    "strides": (rule({"q": torch.randn(2, 4, 2, 16)[..., ::2]}), "q has"),
    "k's dtype": (rule({"k": GIVEN["k"].double()}), "k has dtype float64; it must be float32"),
    "integers": (rule({"beta": GIVEN["beta"].int()}), "beta has dtype int32"),
    "booleans": (rule({"g": GIVEN["g"].bool()}), "g has a dtype other than"),
    "devices": (rule({"A_log": GIVEN["A_log"].to("meta")}), "tensors are on cpu, meta"),
    "write": (rule(write="relu"), "write is 'relu'; it must be 'plain', 'sigmoid' or 'twice_sigmoid'"),
    "unhashable write": (rule(write=["plain"]), r"write is \['plain'\]"),
    "write of a step": (one_step(write="relu"), "write is 'relu'"),
    "layout": (rule(layout="tbhd"), "layout is 'tbhd'; it must be 'bthd' or 'bhtd'"),
    "chunk size": (rule(chunk_size=0), "chunk_size is 0"),
    "scale": (rule(qk_scale=float("nan")), "qk_scale is nan"),
    "state's dtype": (rule(initial_state=STATE.double()), "initial_state has dtype float64; states are float32"),
    "state's batch": (rule(initial_state=STATE[:1]), "initial_state has shape"),
    "packed batch": (rule(cu_seqlens=torch.tensor([0, 4])), "with a batch of 2"),
    "scalar cu_seqlens": (rule(cu_seqlens=torch.tensor(4)), "cu_seqlens has 0 axes"),
    "empty cu_seqlens": (
        rule(given=PACKED, cu_seqlens=torch.tensor([]).int(), output_final_state=True),
        "cu_seqlens is empty",
    ),
    "end of cu_seqlens": (rule(given=PACKED, cu_seqlens=torch.tensor([0, 5])), "cu_seqlens ends with 5"),
    "slot out of range": (one_step(slots=torch.tensor([0, 2])), r"slots\[1\] is 2"),
    "slot twice": (one_step(slots=torch.tensor([1, 1])), "slots holds 1 twice"),
    "states without slots": (one_step(state=STATE[:1]), "state has 1 states"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^tfla: .*{sentence}"):
        call()


def test_registered_operator_refuses_unknown_numbers():
    for write in (3, -1, 256):
        with pytest.raises(ValueError, match=r"tfla: options.write is not one of"):
            library.forward(*(GIVEN[name] for name in PER_TOKEN), None, None, None, None, write)
    with pytest.raises(ValueError, match=r"tfla: options.chunk_size is -1"):
        library.forward(*(GIVEN[name] for name in PER_TOKEN), chunk_size=-1)


def test_nothing_is_ignored():
    with pytest.raises(TypeError, match=r"^delta_rule\(\) got an unexpected keyword argument 'scale'"):
        tfla.delta_rule(**GIVEN, scale=1.0)
