"""Where tensors lie and who changes them: strided indices, padding, states in place, empty batches, streams."""

import gc
import os
import resource
import subprocess
import sys

import pytest
import torch

import tfla
from inputs import make_inputs, make_state
from test_cuda import usable
from tfla.reference import recurrence, relative_error

HEADS, DQK, DHV = 2, 8, 12
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not usable(), reason="no GPU, or built without CUDA"))
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def on(device, *size, **options):
    return make_inputs(*size, **options).map(lambda x: x.to(device))


def column(numbers, device, dtype=torch.int64):
    """The first column of a table."""
    return torch.tensor([[x, 1] for x in numbers], device=device, dtype=dtype)[:, 0]


def gradients(h, given):
    return torch.autograd.grad(h.float().square().sum(), list(given))


# ---------------------------------------------------------------- index vectors


@DEVICES
@TYPES
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_boundaries_in_a_column_of_a_table(device, dtype, index):
    given = on(device, 1, 256, HEADS, 16, 24, dtype=dtype).leaves()
    strided = column([0, 100, 256], device, index)
    dense = strided.contiguous()
    assert strided.stride() == (2,)
    h, wanted = (tfla.mlstm(*given, cu_seqlens=cu) for cu in (strided, dense))
    assert torch.equal(h, wanted)
    assert all(torch.equal(x, y) for x, y in zip(gradients(h, given), gradients(wanted, given), strict=True))


@DEVICES
@pytest.mark.parametrize("batch", [2, 3000])
def test_slots_in_a_column_of_a_table(device, batch):
    """Of many states a GPU takes another kernel."""
    tokens = on(device, batch, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0])
    pool = tfla.State(*(x.to(device) for x in make_state(batch + 5, HEADS, DQK, DHV)))
    other = pool.clone()
    strided = column(reversed(range(1, batch + 1)), device)
    h = tfla.mlstm_step(*tokens, pool, slots=strided)
    assert torch.equal(h, tfla.mlstm_step(*tokens, other, slots=strided.contiguous()))
    assert all(torch.equal(x, y) for x, y in zip(pool, other, strict=True))


@DEVICES
@pytest.mark.parametrize("batch", [3, 3000])
def test_a_row_without_a_state_is_padding(device, batch):
    tokens = on(device, batch, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0])
    pool = tfla.State(*(x.to(device) for x in make_state(batch, HEADS, DQK, DHV)))
    before, plain = pool.clone(), pool.clone()
    wanted = tfla.mlstm_step(*tokens, plain)
    slots = torch.arange(batch, device=device)
    slots[1] = -1
    h = tfla.mlstm_step(*tokens, pool, slots=slots)
    assert not h[1].any() and torch.equal(h[[0, 2]], wanted[[0, 2]])
    for x, y, z in zip(pool, before, plain, strict=True):
        assert torch.equal(x[1], y[1]) and torch.equal(x[[0, 2]], z[[0, 2]])


# ---------------------------------------------------------------- padding


@DEVICES
@TYPES
@pytest.mark.parametrize("bounds", [[0, 100], [0, 0, 100], [0, 50, 100], [0, 100, 100], [0, 0]], ids=str)
@pytest.mark.parametrize("formulation", [tfla.mlstm, tfla.mlstm_parallel, tfla.mlstm_recurrent])
def test_tokens_behind_the_last_sequence_are_padding(formulation, bounds, device, dtype):
    given = on(device, 1, 128, HEADS, 16, 24, dtype=dtype).leaves()
    torch.empty(1, 128, HEADS, 24, device=device).fill_(torch.nan)  # what a new tensor may find
    h, last = formulation(*given, cu_seqlens=torch.tensor(bounds, device=device), output_final_state=True)
    grads = gradients(h, given)
    end = bounds[-1]
    assert last.C.shape[0] == len(bounds) - 1
    for x in (h, *grads):
        assert not x[:, end:].any()
    if end == 0:
        return
    short = given.map(lambda x: x.detach()[:, :end]).leaves()
    wanted, wanted_last = formulation(*short, cu_seqlens=torch.tensor(bounds, device=device), output_final_state=True)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert relative_error(h[:, :end].detach().cpu(), wanted.detach().cpu()) < bound
    for name, x, y in zip("qkvif", grads, gradients(wanted, short), strict=True):
        assert relative_error(x[:, :end].cpu(), y.cpu()) < bound, name
    for x, y in zip(last, wanted_last, strict=True):
        assert relative_error(x.detach().cpu(), y.detach().cpu()) < bound


@DEVICES
def test_one_boundary_is_refused(device):
    with pytest.raises(ValueError, match="cu_seqlens has 1 element for 16 tokens"):
        tfla.mlstm(*on(device, 1, 16), cu_seqlens=torch.zeros(1, dtype=torch.int64, device=device))


@pytest.mark.skipif(not usable(), reason="no GPU, or built without CUDA")
@pytest.mark.parametrize("bounds", [[30, 100, 128], [0, 300], [-5, 100], [100, 30, 90]], ids=str)
def test_bad_boundaries_leave_nothing_unwritten_on_a_gpu(bounds):
    given = on("cuda", 1, 128, HEADS, 16, 24, dtype=torch.bfloat16)
    for _ in range(3):
        torch.full((1, 128, HEADS, 24), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert tfla.mlstm(*given, cu_seqlens=torch.tensor(bounds, device="cuda")).isfinite().all()


# ---------------------------------------------------------------- no tokens


EMPTY = {
    "no tokens": ((2, 0), {}),
    "no rows": ((0, 5), {}),
    "neither": ((0, 0), {}),
    "no packed tokens": ((1, 0), {"cu_seqlens": [0]}),
    "packed sequences without tokens": ((1, 0), {"cu_seqlens": [0, 0, 0]}),
}


@DEVICES
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("formulation", [tfla.mlstm, tfla.mlstm_parallel, tfla.mlstm_recurrent])
def test_empty_batches_train(formulation, name, device):
    size, options = EMPTY[name]
    given = on(device, *size).leaves()
    options = {key: torch.tensor(value, device=device) for key, value in options.items()}
    h = formulation(*given, **options)
    h.sum().backward()
    assert all(x.grad.shape == x.shape for x in given)
    h, last = formulation(*given, output_final_state=True, **options)
    (h.sum() + last.C.sum() + last.n.sum()).backward()


@DEVICES
def test_no_tokens_hand_the_state_on(device):
    given = on(device, 2, 0).leaves()
    state = tfla.State(*(x.to(device).requires_grad_() for x in make_state(2, 2, 8, 12)))
    _, last = tfla.mlstm(*given, initial_state=state, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(last, state, strict=True))
    last.C.square().sum().backward()
    assert torch.equal(state.C.grad, 2 * state.C)


# ---------------------------------------------------------------- changes that autograd has to see


def stepped(given, state):
    with torch.no_grad():
        tfla.mlstm_step(*given.map(lambda x: x.detach()[:, 0]), state)


CHANGES = {
    "a step": lambda given, state, cu: stepped(given, state),
    "a step in slots": lambda given, state, cu: tfla.mlstm_step(
        *given.map(lambda x: x.detach()[:, 0]), state, slots=torch.tensor([1], device=cu.device)
    ),
    "C": lambda given, state, cu: state.C.mul_(2),
    "n": lambda given, state, cu: state.n.mul_(2),
    "m": lambda given, state, cu: state.m.add_(1),
    "cu_seqlens": lambda given, state, cu: cu[1:2].add_(5),
}


@DEVICES
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("output_final_state", [False, True])
def test_a_change_before_backward_is_noticed(output_final_state, change, device):
    given = on(device, 1, 37).leaves()
    state = tfla.State(*(x.to(device) for x in make_state(2, 2, 8, 12)))
    cu = torch.tensor([0, 10, 37], device=device)
    h = tfla.mlstm(*given, initial_state=state, cu_seqlens=cu, output_final_state=output_final_state)
    h = h[0] if output_final_state else h
    with torch.no_grad():
        CHANGES[change](given, state.rows(slice(0, 1)) if change == "a step" else state, cu)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


def test_a_step_counts_as_a_change():
    tokens = make_inputs(3, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0])
    state = tfla.State(*make_state(3, HEADS, DQK, DHV))
    for call in range(1, 4):
        tfla.mlstm_step(*tokens, state, slots=None if call == 1 else torch.tensor([2, 1, 0]))
        assert [x._version for x in state] == [call] * 3
    with torch.inference_mode():
        inferred = tfla.State(*make_state(3, HEADS, DQK, DHV))
        tfla.mlstm_step(*tokens, inferred)
        tfla.mlstm_step(*tokens, state)


def test_saved_tensors_go_through_hooks():
    given, seen = make_inputs(1, 37).leaves(), []
    state, cu = make_state(2, 2, 8, 12), torch.tensor([0, 10, 37])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.data_ptr()) or x, lambda x: x):
        tfla.mlstm(*given, initial_state=state, cu_seqlens=cu)
    assert {x.data_ptr() for x in (*given, *state, cu)} <= set(seen)


# ---------------------------------------------------------------- vmap


@DEVICES
def test_vmap_over_nothing(device):
    given = on(device, 2, 5)
    h = torch.func.vmap(lambda q: tfla.mlstm(q, *list(given)[1:]))(torch.randn(0, *given.q.shape, device=device))
    assert h.shape == (0, *given.v.shape)


@DEVICES
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_steps(axis, device):
    tokens = on(device, 6, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0])
    whole = tfla.State(*(x.to(device) for x in make_state(6, HEADS, DQK, DHV)))
    wanted_state = whole.clone()
    wanted = tfla.mlstm_step(*tokens, wanted_state)
    # Three calls of two rows; along axis 1 the state is no view of one with the rows in a line.
    parts = tfla.State(*(x.unflatten(0, (3, 2)).movedim(0, axis).contiguous() for x in whole))
    split = tokens.map(lambda x: x.unflatten(0, (3, 2)))
    h = torch.func.vmap(
        lambda q, k, v, i, f, C, n, m: tfla.mlstm_step(q, k, v, i, f, (C, n, m)), in_dims=(0,) * 5 + (axis,) * 3
    )(*split, *parts)
    assert relative_error(h.flatten(0, 1).cpu(), wanted.cpu()) < 1e-6
    for x, y in zip(parts, wanted_state, strict=True):
        assert relative_error(x.movedim(axis, 0).flatten(0, 1).cpu(), y.cpu()) < 1e-6


def test_vmap_over_steps_on_one_state_is_refused():
    tokens = make_inputs(2, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0])
    state = make_state(2, HEADS, DQK, DHV)
    with pytest.raises(ValueError, match="the state is not batched by vmap"):
        torch.func.vmap(lambda q: tfla.mlstm_step(q, *list(tokens)[1:], state))(torch.randn(3, *tokens.q.shape))


# ---------------------------------------------------------------- memory


LIMITED = """
import resource, torch, tfla
q = torch.randn(1, 4000, 8, 256)
g = torch.zeros(1, 4000, 8)
tfla.mlstm(*(x[:, :10] for x in (q, q, q, g, g)))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (12 << 20),) * 2)  # h takes 33 MB
for call in (lambda: torch.empty_like(q), lambda: tfla.mlstm(q, q, q, g, g)):
    try:
        call()
    except RuntimeError as error:
        print(type(error).__name__, str(error).splitlines()[0].split("try")[0])
"""


def test_torch_says_itself_that_memory_ran_out():
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    own, ours = done.stdout.splitlines()
    assert "RuntimeError" in ours and "DefaultCPUAllocator" in ours
    if torch.__version__ >= "2.13":  # before, it does not hand its sentence on
        assert own == ours


@pytest.mark.skipif(not usable(), reason="no GPU, or built without CUDA")
@pytest.mark.parametrize("trains", [False, True])
def test_out_of_memory_on_a_gpu_is_torchs_own(trains):
    total = torch.cuda.get_device_properties(0).total_memory
    q = torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.bfloat16).expand(1, 8, 1, 8).requires_grad_(trains)
    tokens = total // 2 // 16 * 2  # h takes twice the memory there is
    v = torch.zeros(1, 1, 1, 16, device="cuda", dtype=torch.bfloat16)
    given = [q[:, :1].expand(1, tokens, 1, 8)] * 2 + [v.expand(1, tokens, 1, 16)]
    gates = [torch.zeros(1, 1, 1, device="cuda").expand(1, tokens, 1)] * 2
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        tfla.mlstm(*given, *gates)


def test_refused_calls_give_their_tensors_back():
    def refused(times):
        for _ in range(times):
            given = [torch.zeros(1, 64, 4, 64) for _ in range(3)] + [torch.zeros(1, 64, 4) for _ in range(2)]
            with pytest.raises(ValueError, match="q is missing"):
                tfla.mlstm(None, *given[1:])
            with pytest.raises(ValueError, match="k is missing"):
                tfla.mlstm(given[0], None, *given[2:], cu_seqlens=torch.tensor([0, 64]))

    refused(100)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(1500)  # of 130 KB or more each
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KB


# ---------------------------------------------------------------- states


@DEVICES
@pytest.mark.parametrize("formulation", [tfla.mlstm, tfla.mlstm_parallel, tfla.mlstm_recurrent])
def test_an_empty_state_may_have_a_max_of_minus_infinity(formulation, device):
    given = on(device, 2, 50)
    C, n, _ = (x.to(device) for x in make_state(2, 2, 8, 12))
    empty = tfla.State(C, n, torch.full((2, 2), -torch.inf, device=device))
    wanted = formulation(*given, initial_state=tfla.State.zeros(2, 2, 8, 12, device=device))
    h = formulation(*given, initial_state=empty)
    assert relative_error(h.cpu()[:, 20:], wanted.cpu()[:, 20:]) < 1e-2  # the empty state's m is a floor no more
    assert h.isfinite().all()
    closed = given.map(lambda x: x)
    closed.i = torch.full_like(given.i, -torch.inf)
    assert not formulation(*closed, initial_state=empty).any()
    state = empty.clone()
    assert not tfla.mlstm_step(*closed.map(lambda x: x[:, 0]), state).any()
    h = tfla.mlstm_step(*given.map(lambda x: x[:, 0]), state)
    fresh = tfla.State(torch.zeros_like(C), torch.zeros_like(n), empty.m.clone())
    assert relative_error(h.cpu(), tfla.mlstm_step(*given.map(lambda x: x[:, 0]), fresh).cpu()) < 1e-6


@DEVICES
def test_the_plan_knows_a_gradient_of_the_last_n(device):
    """Heads for which kernels of Hopper differ with it."""
    given = on(device, 1, 300, 2, 128, 256, dtype=torch.bfloat16).leaves()
    h, last = tfla.mlstm(*given, output_final_state=True)
    grads = torch.autograd.grad(h.float().sum() + last.n.sum(), list(given), retain_graph=True)
    exact = given.map(lambda x: x.detach().cpu().double()).leaves()
    wanted, wanted_last = recurrence(*exact)
    exact_grads = torch.autograd.grad(wanted.sum() + wanted_last[1].sum(), list(exact))
    for name, x, y in zip("qkvif", grads, exact_grads, strict=True):
        assert relative_error(x.cpu(), y) < 3e-2, name
