"""The operators inside PyTorch: registration, derivatives, torch.compile, autocast, checkpointing, torch.func."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tfla
from inputs import make_inputs, make_state
from tfla._options import OPTIONS, encode_all
from tfla._torch import derivatives, fast_path
from tfla._torch import operators as library
from tfla.reference import BOUNDS, recurrence, relative_error

DOUBLE = torch.float64
GIVEN = encode_all(tuple(option.default for option in OPTIONS))
KEEPING_STATES = encode_all(tuple("states" if option.name == "keep" else option.default for option in OPTIONS))


def small(**options):
    return make_inputs(2, 5, 2, 3, 2, dtype=DOUBLE, **options)


# ---------------------------------------------------------------- registration
def opcheck_cases():
    given, state = small(), make_state(2, 2, 3, 2, DOUBLE)
    dh, (dC, dn, _) = torch.randn(2, 5, 2, 2, dtype=DOUBLE), state
    none, leaves = (None, None, None), tuple(given.leaves())
    packed = tuple(make_inputs(1, 5, 2, 3, 2).leaves())
    cu_seqlens = torch.tensor([0, 2, 5])
    return {
        "mlstm": (library.forward, (*leaves, *none, None, *GIVEN)),
        "mlstm_packed": (library.forward, (*packed, *none, cu_seqlens, *GIVEN)),
        "mlstm_with_saved": (library.forward_with_saved, (*leaves, *none, None, *GIVEN)),
        "mlstm_with_saved_packed": (library.forward_with_saved, (*packed, *none, cu_seqlens, *GIVEN)),
        "mlstm_with_saved_states": (library.forward_with_saved, (*leaves, *none, None, *KEEPING_STATES)),
        "mlstm_with_state_and_saved": (library.forward_with_state_and_saved, (*leaves, *state, None, *KEEPING_STATES)),
        "mlstm_with_state_and_saved_packed": (
            library.forward_with_state_and_saved,
            (*packed, *none, cu_seqlens, *GIVEN),
        ),
        "mlstm_with_state_and_saved_defaults": (library.forward_with_state_and_saved, leaves),
        "mlstm_with_state": (library.forward_with_state, (*leaves, *state, None, *GIVEN)),
        "mlstm_with_state_packed": (library.forward_with_state, (*packed, *none, cu_seqlens, *GIVEN)),
        "mlstm_backward": (library.backward, (dh, None, None, None, *given, *none, None, *GIVEN)),
        "mlstm_backward_state": (library.backward, (dh, dC, dn, None, *given, *state, None, *GIVEN)),
        "mlstm_backward_with_saved": (
            library.backward,
            (dh, None, None, torch.empty(0, dtype=torch.uint8), *given, *none, None, *GIVEN),
        ),
        "mlstm_backward_with_saved_states": (
            library.backward,
            (dh, dC, dn, torch.empty(0, dtype=torch.uint8), *given, *state, None, *KEEPING_STATES),
        ),
        "mlstm_defaults": (library.forward, leaves),
        "mlstm_with_saved_defaults": (library.forward_with_saved, leaves),
        "mlstm_with_state_defaults": (library.forward_with_state, leaves),
        "mlstm_backward_defaults": (library.backward, (dh, None, None, None, *given)),
        "mlstm_step_defaults": (library.step, (*given, *state)),
        # These have no derivative: mlstm gives them one.
        "mlstm_alone": (library.forward_alone, tuple(given)),
        "mlstm_with_saved_alone": (library.forward_with_saved_alone, tuple(given)),
        "mlstm_backward_alone": (library.backward_alone, (dh, None, *given)),
        "mlstm_step_alone": (library.step_alone, (*given, *state)),
        "mlstm_step": (library.step, (*given, *state, None, *GIVEN[:6])),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", opcheck_cases())
def test_opcheck(case):
    operator, arguments = opcheck_cases()[case]
    result = torch.library.opcheck(operator, arguments)
    assert set(result.values()) == {"SUCCESS"}, result


# ---------------------------------------------------------------- derivatives
@pytest.mark.parametrize(
    "options",
    # With an eps the exponential gate's h depends a little on m, which the gradient holds constant.
    [{"exact_normalizer_grad": True, "eps": 0.0}, {"gate": "sigmoid"}, {"gate": "sigmoid", "soft_cap": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_gradcheck(options, layout):
    given = make_inputs(1, 4, 2, 2, 2, qk_heads=1, dtype=DOUBLE)
    if layout == "bhtd":
        given = given.map(lambda x: x.transpose(1, 2).contiguous())
    C, n, m = make_state(1, 2, 2, 2, DOUBLE, m=0.0 if "gate" in options else 0.3)

    def function(q, k, v, i, f, C, n):
        h, last = tfla.mlstm(
            q, k, v, i, f, initial_state=(C, n, m), output_final_state=True, chunk_size=2, layout=layout, **options
        )
        true_scale = torch.exp(last.m)[..., None]
        return h, true_scale[..., None] * last.C, true_scale * last.n

    assert torch.autograd.gradcheck(function, (*given.leaves(), C.requires_grad_(), n.requires_grad_()))


def test_double_backward_is_refused():
    given = small().leaves()
    (dq,) = torch.autograd.grad(tfla.mlstm(*given).sum(), given.q, create_graph=True)
    with pytest.raises(RuntimeError, match="asked for a second derivative"):
        dq.sum().backward()


def test_forward_mode_is_refused():
    given = tuple(small())
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(tfla.mlstm, given, given)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        tfla.mlstm(*(torch.autograd.forward_ad.make_dual(x, x) for x in given))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        derivatives.call(library.forward, tuple(torch.autograd.forward_ad.make_dual(x, x) for x in given))


def loss(*inputs, **options):
    return tfla.mlstm(*inputs, **options).square().sum()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("keep", ["denominators", "states"])
@pytest.mark.parametrize("last_state", [False, True])
@pytest.mark.parametrize("given_state", [False, True])
def test_what_is_kept_goes_from_forward_to_backward(monkeypatch, given_state, last_state, keep, compiled):
    """As training does on a GPU, but on the CPU, where it is empty."""
    options = {"initial_state": make_state(2, 2, 3, 2, DOUBLE), "soft_cap": 2.0} if given_state else {}
    options |= {"keep": keep} if keep != "denominators" else {}

    def loss(*inputs):
        if not last_state:
            return tfla.mlstm(*inputs, **options).square().sum()
        h, last = tfla.mlstm(*inputs, output_final_state=True, **options)
        return h.square().sum() + last.C.square().sum()

    plain, handed = small().leaves(), small().leaves()
    loss(*plain).backward()
    for module in (derivatives, fast_path):
        monkeypatch.setattr(module, "keeps", lambda q: True)
    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        function(*handed).backward()
    names = {event.key.replace("::_", "::") for event in profile.key_averages() if event.key.startswith("tfla::")}
    assert names == {f"tfla::mlstm_with_{'state_and_saved' if last_state else 'saved'}", "tfla::mlstm_backward"}
    backward = next(event for event in profile.events() if event.name.endswith("mlstm_backward"))
    assert backward.input_shapes[1 if "::_" in backward.name else 3] == [0]  # no bytes, but a tensor
    for x, y in zip(handed, plain, strict=True):
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("operator", [library.forward, library.forward_with_state], ids=str)
@pytest.mark.parametrize("given_state", [False, True])
def test_fast_path_changes_no_result(operator, given_state):
    """Bit for bit: what the plain way returns, and its gradients."""
    found = []
    for way in (derivatives, fast_path):
        leaves, state = small().leaves(), make_state(2, 2, 3, 2, DOUBLE)
        options = (*(x.requires_grad_() for x in state[:2]), state[2], None, 1, 2) if given_state else ()
        outputs = way.call(operator, (*leaves, *options))
        outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
        grads = torch.autograd.grad([x.square().sum() for x in outputs], (*leaves, *options[:2]))
        found.append((*outputs, *grads))
    assert len(found[0]) == (1 if operator is library.forward else 3) + (7 if given_state else 5)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_func_grad_and_vmap():
    """Gradients per sample, by torch.func, are rows of the gradient of the batch."""
    given = small().leaves()
    batch = torch.autograd.grad(loss(*given), tuple(given))
    plain = tuple(x.detach() for x in given)
    everything = tuple(range(5))
    for x, y in zip(torch.func.grad(loss, argnums=everything)(*plain), batch, strict=True):
        assert torch.equal(x, y)
    by_state = [
        lambda *x, part=part: tfla.mlstm(*x, output_final_state=True)[1][part].square().sum() for part in (0, 1)
    ]
    for function in by_state:
        wanted = torch.autograd.grad(function(*given), tuple(given))
        for x, y in zip(torch.func.grad(function, argnums=everything)(*plain), wanted, strict=True):
            assert torch.equal(x, y)
    per_sample = torch.func.vmap(torch.func.grad(lambda *x: loss(*(y[None] for y in x)), argnums=everything))
    for x, y in zip(per_sample(*plain), batch, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *plain[1:]).sum())(plain[0])


def test_vmap_with_shared_inputs_and_states():
    """vmap over some inputs and along another axis than the first equals a loop."""
    q, k, v, i, f = small()
    state = make_state(2, 2, 3, 2, DOUBLE)
    many_q, many_C = torch.stack([q, 2 * q, -q], dim=2), torch.stack([state[0], -state[0], 0 * state[0]])

    def function(q, C):
        return tfla.mlstm(q, k, v, i, f, initial_state=(C, *state[1:]), output_final_state=True)

    h, last = torch.func.vmap(function, in_dims=(2, 0))(many_q, many_C)
    for j in range(3):
        one_h, one_last = function(many_q[:, :, j], many_C[j])
        assert torch.equal(h[j], one_h)
        assert all(torch.equal(x[j], y) for x, y in zip(last, one_last, strict=True))
    packed = make_inputs(1, 5, 2, 3, 2)
    with pytest.raises(ValueError, match="cu_seqlens is given under vmap"):
        torch.func.vmap(lambda q: tfla.mlstm(q, *list(packed)[1:], cu_seqlens=torch.tensor([0, 5])))(packed.q[None])


# ---------------------------------------------------------------- compilation and contexts
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_graph_breaks(backend):
    state = make_state(2, 2, 8, 12)

    def function(q, k, v, i, f):
        h, last = tfla.mlstm(
            q * 2, k, v, i, f, initial_state=state, output_final_state=True, soft_cap=15.0, layout="bhtd"
        )
        return torch.tanh(h).sum() + last.C.sum()

    given = make_inputs().map(lambda x: x.transpose(1, 2))
    eager, compiled = given.leaves(), given.leaves()
    function(*eager).backward()
    torch.compile(function, fullgraph=True, backend=backend)(*compiled).backward()
    for x, y in zip(compiled, eager, strict=True):
        assert relative_error(x.grad, y.grad) < 1e-6


def test_compiled_with_dynamic_lengths():
    compiled = torch.compile(tfla.mlstm, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 31):
        given = make_inputs(tokens=tokens)
        assert torch.equal(compiled(*given), tfla.mlstm(*given))
    packed = make_inputs(1, 31)
    for bounds in ([0, 31], [0, 4, 31], [0, 9, 9, 31]):
        cu_seqlens = torch.tensor(bounds)
        assert torch.equal(compiled(*packed, cu_seqlens=cu_seqlens), tfla.mlstm(*packed, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_lowers_q_k_v_and_leaves_gates(compiled):
    function = torch.compile(tfla.mlstm, fullgraph=True, backend="aot_eager") if compiled else tfla.mlstm
    given = make_inputs().leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = function(*given)
    assert h.dtype == torch.bfloat16
    lowered = (*(x.detach().bfloat16() for x in (given.q, given.k, given.v)), given.i.detach(), given.f.detach())
    assert torch.equal(h, tfla.mlstm(*lowered))
    assert relative_error(h, recurrence(*lowered)[0]) < BOUNDS[torch.bfloat16][0]
    h.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tfla.mlstm(*small()).dtype == DOUBLE
        state = tfla.State.zeros(2, 2, 8, 12)
        assert tfla.mlstm_step(*make_inputs(tokens=1), state).dtype == torch.bfloat16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    plain, saved = make_inputs().leaves(), make_inputs().leaves()
    loss(*plain).backward()
    checkpoint(loss, *saved, use_reentrant=use_reentrant).backward()
    for x, y in zip(saved, plain, strict=True):
        assert torch.equal(x.grad, y.grad)


def test_views_are_not_copied():
    """Both layouts of the same memory take the same path: equal bits, and no operator that copies."""
    given = make_inputs(1, 512, 4, 64, 64)
    one = tfla.mlstm(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        other = tfla.mlstm(*given.map(lambda x: x.transpose(1, 2)), layout="bhtd")
    assert torch.equal(one, other.transpose(1, 2))
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to"}, names


def test_inference_mode_and_fake_tensors():
    with torch.inference_mode():
        tfla.mlstm(*make_inputs())
    with torch._subclasses.FakeTensorMode():
        h, last = tfla.mlstm(*make_inputs().map(torch.empty_like), output_final_state=True)
        _, low = tfla.mlstm(*make_inputs(dtype=torch.bfloat16).map(torch.empty_like), output_final_state=True)
        turned = make_inputs().map(lambda x: torch.empty_like(x.transpose(1, 2)))
        _, head_first = tfla.mlstm(*turned, output_final_state=True, layout="bhtd")
        cu_seqlens = torch.empty(5, dtype=torch.int32)
        _, packed = tfla.mlstm(*make_inputs(1).map(torch.empty_like), cu_seqlens=cu_seqlens, output_final_state=True)
    assert h.shape == (2, 37, 2, 12) and last.C.shape == (2, 2, 8, 12)
    assert {x.dtype for x in low} == {torch.float32} and packed.n.shape == (4, 2, 8)
    assert [x.shape for x in head_first] == [x.shape for x in last]
