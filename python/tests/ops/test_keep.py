"""What forward keeps for backward, on a machine without a GPU: what is accepted, and sizes as a GPU's plan has them."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tfla
from inputs import make_inputs, make_state
from tfla import info
from tfla._options import CODES, OPTIONS, encode_all
from tfla._torch import fake
from tfla.nn import MLSTMLayer

GPUS = ["H200", "A100"]  # of their own kernels, and of portable ones
SHAPES = [(2, 300, 3, 64, 64), (1, 5, 2, 128, 256), (3, 128, 1, 24, 20), (2, 1000, 2, 256, 512), (1, 130, 1, 512, 64)]


def gradients(given, **options):
    leaves = given.leaves()
    h = tfla.mlstm(*leaves, **options)
    return h, torch.autograd.grad(h.square().sum(), list(leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_cpu_keeps_nothing(packed, dtype):
    """So the results are the same bits."""
    given = make_inputs(1 if packed else 2, 150, 2, 16, 24, dtype=dtype)
    options = {"cu_seqlens": torch.tensor([0, 70, 150])} if packed else {"initial_state": make_state(2, 2, 16, 24)}
    found = [gradients(given, keep=keep, **options) for keep in CODES.keep]
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(x, y) for x, y in zip(found[0][1], found[1][1], strict=True))
    assert info.saved(tokens=150, heads=2, dqk=16, dhv=24, keep="states", device="cpu")[:2] == (0, "nothing")


@pytest.mark.parametrize("keep", ["nothing", "state", None, 2, ["states"]], ids=str)
def test_what_is_not_to_be_kept(keep):
    with pytest.raises(ValueError, match=r"^tfla: keep is .*; it must be 'denominators' or 'states'$"):
        tfla.mlstm(*make_inputs(), keep=keep)


def test_a_layer_hands_it_on(monkeypatch):
    asked = []
    monkeypatch.setattr("tfla.nn.cell.mlstm", lambda *given, **options: asked.append(options["keep"]) or given[2])
    for options in ({}, {"keep": "states"}):
        MLSTMLayer(16, 2, **options)(torch.randn(1, 5, 16))
    assert asked == ["denominators", "states"]


# ---------------------------------------------------------------- plans of GPUs that are not here
def test_states_are_not_made_again():
    shape = {"batch": 8, "tokens": 8192, "heads": 8, "dqk": 256, "dhv": 512, "dtype": "bfloat16"}
    plans = {
        keep: info.describe("backward", **shape, device="cuda", keep=keep, gpu="H200").splitlines()
        for keep in ("denominators", "states")
    }
    kernels = {keep: [line.removeprefix("kernels").split()[:1] for line in plan] for keep, plan in plans.items()}
    assert ["states"] in kernels["denominators"] and ["states"] not in kernels["states"]


@pytest.mark.parametrize("dtype", info.DTYPES)
@pytest.mark.parametrize("gpu", GPUS)
def test_backward_finds_what_forward_left(gpu, dtype):
    """The same bytes of the same things in both plans."""
    for batch, tokens, heads, dqk, dhv in SHAPES:
        for keep in CODES.keep:
            call = {"batch": batch, "tokens": tokens, "heads": heads, "dqk": dqk, "dhv": dhv, "dtype": dtype}
            plans = [
                info.describe(operation, **call, keep=keep, device="cuda", gpu=gpu)
                for operation in ("forward", "backward")
            ]
            one, other = (re.search(r"^saved +(\d+) bytes: (.*)", plan, re.MULTILINE).groups() for plan in plans)
            assert one == other and int(one[0]) == info.saved(**call, keep=keep, gpu=gpu).bytes


KEEPS_STATES = [
    ({}, "states"),
    ({"dqk": 256, "dhv": 512}, "states"),
    ({"sequences": 5}, "states"),
    ({"chunk_size": 64}, "states"),
    ({"dtype": "float32"}, "states"),  # by portable kernels
    ({"dqk": 100}, "states"),
    ({"dtype": "float16"}, "denominators"),
    ({"dqk": 512}, "denominators"),
    ({"dqk": 256, "sequences": 5}, "denominators"),
    ({"chunk_size": 256}, "denominators"),
]


@pytest.mark.parametrize(("change", "kept"), KEEPS_STATES, ids=str)
def test_where_hopper_keeps_states(change, kept):
    """As docs/python/keep.md says."""
    call = {"tokens": 8192, "heads": 4, "dqk": 128, "dhv": 256, "gpu": "H200", **change}
    assert info.saved(**call, keep="states").keep == kept
    assert info.saved(**call, keep="denominators").keep == "denominators"


def test_bytes_of_the_page():
    """Two bytes times dqk dhv, and four times dqk, for each 128 tokens and head; eight for each token and head."""
    found = {
        keep: info.saved(batch=8, tokens=8192, heads=16, dqk=128, dhv=256, keep=keep, gpu="H200").bytes
        for keep in ("nothing", "denominators", "states")
    }
    tokens = 8 * 8192 * 16
    assert found == {
        "nothing": 0, "denominators": 8 * tokens, "states": 8 * tokens + tokens // 128 * 128 * (2 * 256 + 4),
    }  # fmt: skip


def test_gpus_by_name():
    with pytest.raises(RuntimeError, match=r"^tfla: gpu is H2; it must be one of .*H200"):
        info.saved(tokens=1, heads=1, dqk=8, dhv=8, keep="states", gpu="H2")
    with pytest.raises(ValueError, match=r"^tfla: keep is 'all'; it must be 'nothing', 'denominators' or 'states'$"):
        info.saved(tokens=1, heads=1, dqk=8, dhv=8, keep="all", gpu="H200")


# ---------------------------------------------------------------- what torch.compile is told
def symbols(*sizes: int):
    """The same sizes as symbols of a graph, each of its own."""
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    made = [mode.from_tensor(torch.empty(size + 2), symbolic_context=dynamic).shape[0] - 2 for size in sizes]
    assert not any(isinstance(size, int) for size in made)
    return made


def on_gpu(*shape, dtype=None):
    return SimpleNamespace(shape=shape, dtype=dtype, is_cuda=True, device=torch.device("cuda"))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("sequences", [None, 1, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gpu", GPUS)
def test_sizes_of_fake_kernels_are_those_of_the_plan(monkeypatch, gpu, shape, sequences, symbolic):
    plan = info.saved
    monkeypatch.setattr(info, "saved", lambda **call: plan(**call, gpu=gpu))
    batch, tokens, heads, dqk, dhv = shape
    batch = 1 if sequences is not None else batch
    b, t, h, n = symbols(batch, tokens, heads, sequences or 0) if symbolic else (batch, tokens, heads, sequences)
    cu_seqlens = None if sequences is None else on_gpu(n + 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for keep in CODES.keep:
            for chunk_size in (None, 64, 300):
                given = {"keep": keep, "chunk_size": chunk_size}
                options = encode_all(tuple(given.get(option.name, option.default) for option in OPTIONS))
                q, v = on_gpu(b, t, h, dqk, dtype=dtype), on_gpu(b, t, h, dhv, dtype=dtype)
                wanted = plan(
                    batch=batch, tokens=tokens, heads=heads, dqk=dqk, dhv=dhv, sequences=sequences, gpu=gpu,
                    dtype=str(dtype).removeprefix("torch."), **given,
                )  # fmt: skip
                assert int(fake._saved_bytes(q, v, cu_seqlens, options)) == wanted.bytes, (dtype, given)


def test_sizes_in_both_layouts_and_without_a_gpu(monkeypatch):
    plan = info.saved
    monkeypatch.setattr(info, "saved", lambda **call: plan(**call, gpu="H200"))
    options = {"keep": "states", "layout": "bhtd"}
    turned = encode_all(tuple(options.get(option.name, option.default) for option in OPTIONS))
    q, v = on_gpu(2, 3, 500, 64, dtype=torch.bfloat16), on_gpu(2, 3, 500, 128, dtype=torch.bfloat16)
    wanted = plan(batch=2, tokens=500, heads=3, dqk=64, dhv=128, keep="states", gpu="H200")
    assert fake._saved_bytes(q, v, None, turned) == wanted.bytes
    q.is_cuda = False
    assert fake._saved_bytes(q, v, None, turned) == 0
