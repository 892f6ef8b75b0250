"""The operators on a GPU, with a tfla and a torch that were built for it; skipped elsewhere."""

import pytest
import torch

import tfla
from inputs import make_inputs, make_state
from tfla import info
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
def test_size_of_kept_denominators(dtype, tokens):
    """What torch.compile is told is what the plan says."""
    given = make_inputs(2, tokens, 3, 32, 64, dtype=dtype).map(lambda x: x.cuda())
    kept = operators.forward_with_denominators(*given)[1]
    with torch._subclasses.FakeTensorMode() as mode:
        fake = operators.forward_with_denominators(*(mode.from_tensor(x) for x in given))[1]
    assert kept.shape == fake.shape and kept.dtype == fake.dtype


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
