"""The operators on a GPU, with a tfla and a torch that were built for it; skipped elsewhere."""

import re
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tfla
from inputs import make_inputs, make_state
from tfla import info
from tfla._options import CODES, OPTIONS, encode_all
from tfla._torch import operators
from tfla.reference import BOUNDS, recurrence, relative_error


def usable() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        info.describe("forward", dqk=8, dhv=8, device="cuda")
    except RuntimeError:
        return False
    return True


pytestmark = pytest.mark.skipif(not usable(), reason="no GPU, or tfla or torch were built without CUDA")


def on_gpu(device: str = "cuda", **options):
    return make_inputs(2, 130, 2, 32, 64, **options).map(lambda x: x.to(device))


# On a GPU chunk states are bfloat16 for float16 too, which has not their range.
GPU_BOUNDS = BOUNDS | {torch.float16: BOUNDS[torch.bfloat16]}


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_values_and_gradients(dtype, layout):
    order = (lambda x: x.transpose(1, 2)) if layout == "bhtd" else (lambda x: x)
    given = on_gpu(dtype=dtype)
    mine, wanted = given.leaves(), given.map(lambda x: x.cpu().double()).leaves()
    h, last = tfla.mlstm(*mine.map(order), output_final_state=True, layout=layout)
    reference, reference_last = recurrence(*wanted)
    dh = torch.randn(reference.shape).to(dtype)
    order(h).backward(dh.cuda())
    reference.backward(dh.double())
    assert relative_error(order(h).cpu(), reference) < GPU_BOUNDS[dtype][0]
    assert relative_error(last.n.cpu(), reference_last[1]) < max(GPU_BOUNDS[dtype][0], 1e-5)
    for name, x, y in zip("qkvif", mine, wanted, strict=True):
        assert relative_error(x.grad.cpu(), y.grad) < GPU_BOUNDS[dtype][1], name


@pytest.mark.parametrize("tokens", [1, 63, 130])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("keep", CODES.keep)
@pytest.mark.parametrize("packed", [False, True])
def test_size_of_what_is_kept(dtype, tokens, keep, packed):
    """What torch.compile is told is what the plan says."""
    given = make_inputs(1 if packed else 2, tokens, 3, 32, 64, dtype=dtype).map(lambda x: x.cuda())
    cu_seqlens = torch.tensor([0, tokens // 2, tokens], device="cuda") if packed else None
    options = encode_all(tuple(keep if option.name == "keep" else option.default for option in OPTIONS))
    for operator in operators.SAVING.values():
        kept = operator(*given, None, None, None, cu_seqlens, *options)[-1]
        with torch._subclasses.FakeTensorMode() as mode:
            moved = [x if x is None else mode.from_tensor(x) for x in (*given, None, None, None, cu_seqlens)]
            fake = operator(*moved, *options)[-1]
        assert kept.shape == fake.shape and kept.dtype == fake.dtype and kept.numel() > 0


def saved_bytes(h: torch.Tensor) -> int:
    """Of what autograd keeps as bytes: what forward has left for backward."""
    return sum(x.numel() for x in h.grad_fn.saved_tensors if x is not None and x.dtype == torch.uint8)


# Heads of each backward kernel of Hopper's, wide ones whose states are not kept, and lengths that end inside a chunk.
KEPT = [
    (2, 300, 2, 64, 64),
    (2, 1000, 2, 128, 256),
    (1, 5000, 1, 128, 128),
    (1, 700, 2, 256, 512),
    (1, 260, 1, 512, 64),
]


@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 130, 255]], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("shape", KEPT, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kept_states_against_float64(dtype, shape, gate, bounds):
    batch, tokens, heads, dqk, dhv = shape
    if bounds is not None:
        batch, tokens = 1, bounds[-1]
    given = make_inputs(batch, tokens, heads, dqk, dhv, dtype=dtype, gate_dtype=torch.float32)
    mine, wanted = given.map(torch.Tensor.cuda).leaves(), given.map(torch.Tensor.double).leaves()
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cuda")
    h = tfla.mlstm(*mine, gate=gate, cu_seqlens=cu_seqlens, keep="states")
    plan = info.saved(
        batch=batch, tokens=tokens, heads=heads, dqk=dqk, dhv=dhv, dtype=str(dtype).removeprefix("torch."),
        keep="states", sequences=None if bounds is None else len(bounds) - 1,
    )  # fmt: skip
    assert saved_bytes(h) == plan.bytes
    pieces = [(0, tokens)] if bounds is None else list(zip(bounds, bounds[1:], strict=False))
    rows = [recurrence(*wanted.map(lambda x, s=s: x[:, s[0] : s[1]]), gate=gate)[0] for s in pieces if s[0] < s[1]]
    reference = torch.cat(rows, dim=1)
    dh = torch.randn(reference.shape).to(dtype)
    h.backward(dh.cuda())
    reference.backward(dh.double())
    assert relative_error(h.cpu(), reference) < GPU_BOUNDS[dtype][0]
    for name, x, y in zip("qkvif", mine, wanted, strict=True):
        assert relative_error(x.grad.cpu(), y.grad) < GPU_BOUNDS[dtype][1], name


def test_kept_states_take_more_memory_and_spare_a_kernel():
    shape = {"batch": 2, "tokens": 1000, "heads": 2, "dqk": 256, "dhv": 512}
    given = make_inputs(*shape.values(), dtype=torch.bfloat16).map(torch.Tensor.cuda).leaves()
    sizes = {keep: saved_bytes(tfla.mlstm(*given, gate="sigmoid", keep=keep)) for keep in CODES.keep}
    assert sizes["states"] - sizes["denominators"] >= 2 * 2 * (1000 // 128) * 256 * 512 * 2
    plans = {keep: info.describe("backward", **shape, dtype="bfloat16", device="cuda", keep=keep) for keep in sizes}
    kernels = {keep: re.findall(r"^(?:kernels)? +(\w+)", plan, re.MULTILINE) for keep, plan in plans.items()}
    assert "states" in kernels["denominators"] and "states" not in kernels["states"], kernels


@pytest.mark.parametrize("output_final_state", [False, True])
def test_kept_states_in_graphs_and_under_checkpointing(output_final_state):
    """torch.compile, recomputed activations and a captured training step have the gradients of eager mode, in bits."""
    given = make_inputs(2, 300, 2, 64, 128, dtype=torch.bfloat16).map(torch.Tensor.cuda)

    def loss(*inputs):
        result = tfla.mlstm(*inputs, keep="states", output_final_state=output_final_state)
        return result[0].float().square().sum() + result[1].C.sum() if output_final_state else result.float().sum()

    def gradients(function):
        leaves = given.leaves()
        return torch.autograd.grad(function(*leaves), list(leaves))

    wanted = gradients(loss)
    found = [
        gradients(torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic))
        for dynamic in (False, True)
    ]
    found.append(gradients(lambda *x: checkpoint(loss, *x, use_reentrant=False)))
    leaves = given.leaves()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(loss(*leaves), list(leaves))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found.append(torch.autograd.grad(loss(*leaves), list(leaves)))
    graph.replay()
    torch.cuda.synchronize()
    for grads in found:
        assert all(torch.equal(x, y) for x, y in zip(grads, wanted, strict=True))


def test_packed_and_slots():
    given = make_inputs(1, 64).map(torch.Tensor.cuda)
    bounds = [0, 5, 5, 64]
    h = tfla.mlstm(*given, cu_seqlens=torch.tensor(bounds, device="cuda"))
    alone = [tfla.mlstm(*given.map(lambda x, s=s: x[:, bounds[s] : bounds[s + 1]])) for s in (0, 2)]
    assert relative_error(h.cpu(), torch.cat(alone, dim=1).cpu()) < 1e-5
    pool = tfla.State(*(x.cuda() for x in make_state(6, 2, 8, 12)))
    before, slots = pool.clone(), torch.tensor([4, 1], device="cuda")
    tokens = make_inputs(2, 1).map(lambda x: x[:, 0].cuda())
    h = tfla.mlstm_step(*tokens, pool, slots=slots)
    state = tuple(x.cpu() for x in before.rows(slots))
    wanted, after = recurrence(*tokens.map(lambda x: x[:, None].cpu()), state=state)
    assert relative_error(h.cpu(), wanted[:, 0]) < 1e-5
    assert relative_error(pool.C[slots].cpu(), after[0]) < 1e-5
    assert torch.equal(pool.C[[0, 2, 3, 5]], before.C[[0, 2, 3, 5]])


def test_many_short_sequences():
    """Kernels take runs of them for one sequence; with a last state asked for they do not. Each is judged by itself."""
    lengths = [1, 2, 3, 4, 5, 0, 32] * 12 + [130, 1]
    bounds = [sum(lengths[:s]) for s in range(len(lengths) + 1)]
    given = make_inputs(1, bounds[-1], 2, 16, 24).map(torch.Tensor.cuda)
    packing = torch.tensor(bounds, device="cuda")
    mine, wanted = given.leaves(), given.map(lambda x: x.cpu().double()).leaves()
    parts = [slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False) if end > start]
    reference = torch.cat([recurrence(*wanted.map(lambda x, s=s: x[:, s]))[0] for s in parts], dim=1)
    h = tfla.mlstm(*mine, cu_seqlens=packing)
    dh = torch.randn(reference.shape).float()
    h.backward(dh.cuda())
    reference.backward(dh.double())
    assert relative_error(h.cpu(), reference) < GPU_BOUNDS[torch.float32][0]
    for name, x, y in zip("qkvif", mine, wanted, strict=True):
        assert relative_error(x.grad.cpu(), y.grad) < GPU_BOUNDS[torch.float32][1], name
    with_state, _ = tfla.mlstm(*given, cu_seqlens=packing, output_final_state=True)
    assert relative_error(with_state.cpu(), reference) < GPU_BOUNDS[torch.float32][0]


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (128, 128), (128, 256)], ids=str)
def test_more_packed_sequences_than_a_gpu_takes_at_a_time(shape):
    """Each CTA works through several of them, of many chunks each. A dense call for each has other kernels."""
    lengths = [100 + 130 * (s * 7 % 11) for s in range(22)]
    bounds = [sum(lengths[:s]) for s in range(len(lengths) + 1)]
    given = make_inputs(1, bounds[-1], 16, *shape, dtype=torch.bfloat16).map(torch.Tensor.cuda)
    dh = torch.randn_like(given.v)
    alone = given.leaves()
    for start, end in zip(bounds, bounds[1:], strict=False):
        tfla.mlstm(*alone.map(lambda x, s=slice(start, end): x[:, s])).backward(dh[:, start:end])
    for keep in CODES.keep:
        packed = given.leaves()
        tfla.mlstm(*packed, cu_seqlens=torch.tensor(bounds, device="cuda"), keep=keep).backward(dh)
        for name, x, y in zip("qkvif", packed, alone, strict=True):  # both are rounded
            assert relative_error(x.grad.cpu(), y.grad.cpu()) < 2 * GPU_BOUNDS[torch.bfloat16][1], (keep, name)


def test_streams():
    """A call waits for what its stream waits for, and not for others."""
    given, stream = on_gpu(), torch.cuda.Stream()
    wanted = tfla.mlstm(*given)
    with torch.cuda.stream(stream):
        tfla.mlstm(*given.map(lambda x: x + 0))  # memory for this stream: getting it may wait for the GPU
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = given.map(lambda x: x + 0)  # ready only after the sleep
        h = tfla.mlstm(*late)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(h, wanted)


def test_graph():
    given = on_gpu()
    state = tfla.State.zeros(2, 2, 32, 64, device="cuda")
    token = given.map(lambda x: x[:, 0].contiguous())
    for _ in range(2):  # also warms up
        h = tfla.mlstm(*given)
        tfla.mlstm_step(*token, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tfla.mlstm(*given)
        stepped = tfla.mlstm_step(*token, state)
    state.reset_()
    captured.zero_()
    graph.replay()
    fresh = tfla.State.zeros(2, 2, 32, 64, device="cuda")
    assert torch.equal(captured, h) and torch.equal(stepped, tfla.mlstm_step(*token, fresh))
    assert torch.equal(state.C, fresh.C)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    given = on_gpu().leaves()
    compiled = torch.compile(lambda *x: tfla.mlstm(*x).tanh(), fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()  # results of the call before are given up
        h = compiled(*given)
        torch.autograd.grad(h.sum(), list(given))
    assert relative_error(h.detach().cpu(), tfla.mlstm(*given).tanh().detach().cpu()) < 1e-5


def test_autocast():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert tfla.mlstm(*on_gpu()).dtype == torch.bfloat16


def test_tensors_on_two_devices_are_refused():
    given = on_gpu()
    with pytest.raises(ValueError, match="k and q are on different devices"):
        tfla.mlstm(given.q, given.k.cpu(), given.v, given.i, given.f)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_than_the_current_device():
    given = on_gpu("cuda:1")
    with torch.cuda.device(0):
        h = tfla.mlstm(*given)
        assert torch.cuda.current_device() == 0
    assert h.device == torch.device("cuda:1")
    assert relative_error(h.cpu(), recurrence(*given.map(torch.Tensor.cpu))[0]) < 1e-5


def test_the_self_check_of_an_installation_passes():
    result = subprocess.run([sys.executable, "-m", "tfla"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"cuda +(\d+) of \1 checks against float64 passed", result.stdout)
    assert re.search(
        r"forward +bfloat16: gates \(.*\), .*forward \(", result.stdout
    )  # all kernels, not the first alone
