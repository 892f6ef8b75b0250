"""The delta rule inside PyTorch: registration, derivatives, torch.compile, autocast, checkpointing, torch.func."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tfla
from delta_inputs import PER_TOKEN, head_first, leaves, make_delta, make_delta_state, mapped
from tfla._options import DELTA
from tfla._torch import delta as library
from tfla.reference import BOUNDS, delta_recurrence, relative_error

DOUBLE = torch.float64
NAMES = (*PER_TOKEN, "A_log", "dt_bias")
OPTIONS = DELTA.encode_all(("twice_sigmoid", True, "bthd", 0.5, 2))
EVERYTHING = {"A_log": True, "dt_bias": True, "raw_beta": True}

pytestmark = pytest.mark.usefixtures("one_thread")


def small(**options):
    return make_delta(2, 5, 2, 3, 2, qk_heads=1, dtype=DOUBLE, **options)


def small_state():
    return make_delta_state(2, 2, 3, 2, DOUBLE)


def in_order(given):
    return tuple(given.get(name) for name in NAMES)


def rule(*inputs, **options):
    """delta_rule with its tensors in the order of NAMES; those at the end may be left out."""
    given = dict(zip(NAMES, inputs, strict=False))
    return tfla.delta_rule(**given, **options)


def loss(*inputs, **options):
    return rule(*inputs, **options).square().sum()


# ---------------------------------------------------------------- registration
def opcheck_cases():
    given, state = in_order(small(**EVERYTHING)), small_state()
    trained = in_order(leaves(small(**EVERYTHING)))
    ungated = in_order(leaves(small(g=False)))
    packed = in_order(leaves(make_delta(1, 5, 2, 3, 2, qk_heads=1)))
    turned = in_order(mapped(head_first, small(**EVERYTHING)))
    turned_options = DELTA.encode_all(("plain", False, "bhtd", None, None))
    dh, cu_seqlens = torch.randn(2, 5, 2, 2, dtype=DOUBLE), torch.tensor([0, 2, 5])
    return {
        "defaults": (library.forward, trained[:4]),
        "everything": (library.forward, (*trained, state.clone().requires_grad_(), None, *OPTIONS)),
        "packed": (library.forward, (*packed, None, cu_seqlens)),
        "state_defaults": (library.forward_with_state, ungated),
        "state_everything": (library.forward_with_state, (*trained, state.clone().requires_grad_(), None, *OPTIONS)),
        "state_packed": (library.forward_with_state, (*packed, None, cu_seqlens)),
        "state_head_first": (library.forward_with_state, (*turned, state, None, *turned_options)),
        "backward_defaults": (library.backward, (dh, None, *given[:4])),
        "backward_everything": (library.backward, (dh, state, *given, state, None, *OPTIONS)),
        "step_defaults": (library.step, (*given[:4], None, None, None, state)),
        "step_everything": (library.step, (*given, state, torch.tensor([1, 0]), *OPTIONS[:4])),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", opcheck_cases())
def test_opcheck(case):
    operator, arguments = opcheck_cases()[case]
    result = torch.library.opcheck(operator, arguments)
    assert set(result.values()) == {"SUCCESS"}, result


# ---------------------------------------------------------------- derivatives
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize(
    ("inputs", "options"),
    [({"g": False}, {}), ({}, {"write": "sigmoid"}), (EVERYTHING, {"write": "twice_sigmoid", "normalize_qk": True})],
    ids=str,
)
def test_gradcheck(inputs, options, layout):
    given = make_delta(1, 4, 2, 2, 2, qk_heads=1, dtype=DOUBLE, **inputs)
    if layout == "bhtd":
        given = mapped(lambda x: x.transpose(1, 2).contiguous(), given)
    names, state = tuple(given), make_delta_state(1, 2, 2, 2, DOUBLE).requires_grad_()

    def function(state, *tensors):
        named = dict(zip(names, tensors, strict=True))
        return tfla.delta_rule(
            **named, initial_state=state, output_final_state=True, chunk_size=2, layout=layout, **options
        )

    assert torch.autograd.gradcheck(function, (state, *leaves(given).values()))


def test_double_backward_is_refused():
    given = leaves(small())
    (dq,) = torch.autograd.grad(tfla.delta_rule(**given).sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="^tfla: delta_rule was asked for a second derivative"):
        dq.sum().backward()


def test_forward_mode_is_refused():
    given = in_order(small())[:5]
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(rule, given, given)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        rule(*(torch.autograd.forward_ad.make_dual(x, x) for x in given))


def test_parameters_of_heads_alone_have_gradients():
    """As where only a model's gates are trained."""
    given = small(**EVERYTHING)
    trained = {name: given[name].clone().requires_grad_() for name in ("A_log", "dt_bias")}
    wanted = {name: given[name].clone().requires_grad_() for name in ("A_log", "dt_bias")}
    tfla.delta_rule(**given | trained).square().sum().backward()
    delta_recurrence(**given | wanted)[0].square().sum().backward()
    for name, x in trained.items():
        assert relative_error(x.grad, wanted[name].grad) < BOUNDS[DOUBLE][1]


def test_func_grad_and_vmap():
    """Gradients per sample, by torch.func, are those of its row of the batch; of A_log and dt_bias too."""
    given = in_order(leaves(small(**EVERYTHING)))
    plain, everything = tuple(x.detach() for x in given), tuple(range(7))
    for function in (loss, lambda *x: rule(*x, output_final_state=True)[1].square().sum()):
        wanted = torch.autograd.grad(function(*given), given, allow_unused=True)
        found = torch.func.grad(function, argnums=everything)(*plain)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))

    def of_one(*inputs):
        return loss(*(x[None] for x in inputs[:5]), *inputs[5:])

    axes = (*(0,) * 5, None, None)
    per_sample = torch.func.vmap(torch.func.grad(of_one, argnums=everything), in_dims=axes)(*plain)
    for row in range(2):
        wanted = torch.func.grad(of_one, argnums=everything)(*(x[row] for x in plain[:5]), *plain[5:])
        for name, x, y in zip(NAMES, per_sample, wanted, strict=True):
            assert x[row].shape == y.shape and relative_error(x[row], y) < 1e-12, name
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *plain[1:]).sum())(plain[0])


# Which inputs have vmap's axis, and where; the first of them, and the state, are given in all cases.
VMAPPED = {
    "q along another axis": ({"q": 2, "state": 0}, {}),
    "last axis": ({"q": -1, "v": -1, "state": -1}, {}),
    "A_log": ({"q": 0, "A_log": 0, "state": 0}, {}),
    "dt_bias in the other layout": ({"q": 1, "dt_bias": 1, "state": 2}, {"layout": "bhtd"}),
    "A_log alone": ({"A_log": 1}, {"write": "twice_sigmoid", "normalize_qk": True}),
}


def several(x, axis, size=3):
    """x and multiples of it along a new axis."""
    return torch.stack([x * (1 + row) for row in range(size)], dim=axis)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("case", VMAPPED)
def test_vmap_equals_a_loop(case, batch):
    axes, options = VMAPPED[case]
    order = head_first if "layout" in options else lambda x: x
    given = mapped(order, make_delta(batch, 5, 2, 3, 2, qk_heads=1, dtype=DOUBLE, **EVERYTHING))
    given["state"] = make_delta_state(batch, 2, 3, 2, DOUBLE)
    many = {name: several(given[name], axis) for name, axis in axes.items()}

    def function(varied):
        now = {**given, **varied}
        return tfla.delta_rule(initial_state=now.pop("state"), **now, output_final_state=True, **options)

    h, last = torch.func.vmap(function, in_dims=(axes,))(many)
    for row in range(3):
        one_h, one_last = function({name: x.select(axes[name], row).contiguous() for name, x in many.items()})
        assert relative_error(h[row], one_h) < 1e-12 and relative_error(last[row], one_last) < 1e-12


@pytest.mark.parametrize("tokens", [None, 3])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("axes", [{"q": 0, "state": 0}, {"v": 1, "state": 2}, {"A_log": 0, "state": 1}], ids=str)
def test_vmap_of_steps(axes, layout, tokens):
    order = head_first if layout == "bhtd" else lambda x: x
    given = make_delta(2, tokens or 1, 2, 3, 2, qk_heads=1, dtype=DOUBLE, **EVERYTHING)
    given = mapped((lambda x: x[:, 0]) if tokens is None else order, given) | {"state": small_state()}
    many = {name: several(given[name], axis) for name, axis in axes.items()}
    alone = {name: x.clone() for name, x in many.items()}

    def function(varied):
        return tfla.delta_rule_step(**{**given, **varied}, layout=layout)

    h = torch.func.vmap(function, in_dims=(axes,))(many)
    for row in range(3):
        one = {name: x.select(axes[name], row) for name, x in alone.items()}
        assert relative_error(h[row], function(one)) < 1e-12
    assert relative_error(many["state"], alone["state"]) < 1e-12
    assert not torch.equal(many["state"], several(given["state"], axes["state"]))


def test_what_vmap_refuses():
    q, *rest = in_order(make_delta(1, 5, 2, 3, 2, qk_heads=None))[:5]
    with pytest.raises(ValueError, match="tfla: cu_seqlens is given under vmap"):
        torch.func.vmap(lambda q: rule(q, *rest, cu_seqlens=torch.tensor([0, 5])))(q[None])
    state = make_delta_state(1, 2, 3, 2)
    with pytest.raises(ValueError, match="tfla: the state is not batched by vmap"):
        torch.func.vmap(lambda q: tfla.delta_rule_step(q, *rest, state=state))(q[None])
    with pytest.raises(ValueError, match="tfla: slots is given under vmap"):
        torch.func.vmap(lambda q, C: tfla.delta_rule_step(q, *rest, state=C, slots=torch.tensor([0])))(
            q[None], state[None]
        )


# ---------------------------------------------------------------- compilation and contexts
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_graph_breaks(backend):
    state = make_delta_state()

    def function(q, k, v, beta, g, A_log, dt_bias):
        h, last = tfla.delta_rule(
            q * 2, k, v, beta, g, A_log=A_log, dt_bias=dt_bias, initial_state=state, output_final_state=True,
            write="sigmoid", normalize_qk=True, layout="bhtd",
        )  # fmt: skip
        return torch.tanh(h).sum() + last.sum()

    given = mapped(head_first, make_delta(**EVERYTHING))
    eager, compiled = leaves(given), leaves(given)
    function(**eager).backward()
    torch.compile(function, fullgraph=True, backend=backend)(**compiled).backward()
    for name, x in compiled.items():
        assert relative_error(x.grad, eager[name].grad) < 1e-6, name


def test_compiled_with_dynamic_lengths():
    compiled = torch.compile(tfla.delta_rule, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 31):
        given = make_delta(tokens=tokens)
        assert torch.equal(compiled(**given), tfla.delta_rule(**given))
    packed = make_delta(1, 31)
    for bounds in ([0, 31], [0, 4, 31], [0, 9, 9, 31]):
        cu_seqlens = torch.tensor(bounds)
        found = compiled(**packed, cu_seqlens=cu_seqlens, output_final_state=True)
        wanted = tfla.delta_rule(**packed, cu_seqlens=cu_seqlens, output_final_state=True)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_compiled_step():
    given = mapped(lambda x: x[:, 0], make_delta())
    eager, compiled = make_delta_state(), make_delta_state()
    step = torch.compile(tfla.delta_rule_step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(tfla.delta_rule_step(**given, state=eager), step(**given, state=compiled))
    assert torch.equal(eager, compiled)


def test_refused_under_compile():
    """The kernel's own sentence, from inside a compiled graph."""
    compiled = torch.compile(tfla.delta_rule, fullgraph=True, backend="aot_eager")
    given = make_delta()
    with pytest.raises(ValueError, match="tfla: k has shape"):
        compiled(**given | {"k": given["k"][..., :4].contiguous()})


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_lowers_q_k_v_and_leaves_gates(compiled):
    function = torch.compile(tfla.delta_rule, fullgraph=True, backend="aot_eager") if compiled else tfla.delta_rule
    given = leaves(make_delta(A_log=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = function(**given)
    assert h.dtype == torch.bfloat16
    lowered = {name: x.detach().bfloat16() if name in "qkv" else x.detach() for name, x in given.items()}
    assert torch.equal(h, tfla.delta_rule(**lowered))
    assert relative_error(h, delta_recurrence(**lowered)[0]) < BOUNDS[torch.bfloat16][0]
    h.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in given.values())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tfla.delta_rule(**small()).dtype == DOUBLE
        assert tfla.delta_rule_step(**make_delta(tokens=1), state=make_delta_state()).dtype == torch.bfloat16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    plain, saved = leaves(make_delta(A_log=True, dt_bias=True)), leaves(make_delta(A_log=True, dt_bias=True))
    loss(*in_order(plain)).backward()
    checkpoint(loss, *in_order(saved), use_reentrant=use_reentrant).backward()
    assert all(torch.equal(saved[name].grad, x.grad) for name, x in plain.items())


def test_views_are_not_copied():
    """Both layouts of the same memory take the same path: equal bits, and no operator that copies."""
    given = make_delta(1, 128, 4, 32, 32)
    one = tfla.delta_rule(**given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        other = tfla.delta_rule(**mapped(head_first, given), layout="bhtd")
    assert torch.equal(one, other.transpose(1, 2))
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to"}, names


def test_inference_mode_and_fake_tensors():
    with torch.inference_mode():
        tfla.delta_rule(**make_delta())
    cases = [
        (make_delta(), {}),
        (make_delta(dtype=torch.bfloat16), {}),
        (small(), {}),
        (mapped(head_first, make_delta()), {"layout": "bhtd"}),
        (make_delta(1), {"cu_seqlens": torch.tensor([0, 9, 20, 20, 37])}),
    ]
    for given, options in cases:
        wanted = tfla.delta_rule(**given, output_final_state=True, **options)
        with torch._subclasses.FakeTensorMode() as mode:
            tensors = {name: mode.from_tensor(x) for name, x in given.items()}
            kept = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            found = tfla.delta_rule(**tensors, output_final_state=True, **kept)
        for x, y in zip(found, wanted, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
