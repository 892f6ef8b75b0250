"""The convolution inside PyTorch: registration, derivatives, torch.compile, autocast, torch.func."""

import pytest
import torch

import tfla
from conv_reference import conv_reference
from tfla._torch import conv as library

DOUBLE = torch.float64
pytestmark = pytest.mark.usefixtures("one_thread")


def small(batch=2, tokens=5, channels=3, width=3, dtype=DOUBLE):
    numbers = torch.Generator().manual_seed(5)
    shapes = ((batch, tokens, channels), (channels, width), (channels,), (batch, width - 1, channels))
    return [torch.randn(*shape, generator=numbers, dtype=dtype) for shape in shapes]


def leaves(given):
    return [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in given]


def opcheck_cases():
    given, along = small(), small()
    along[0] = along[0].transpose(1, 2).contiguous().transpose(1, 2)
    dy, trained = torch.randn(2, 5, 3, dtype=DOUBLE), leaves(given)
    row, cu_seqlens = leaves(small(1)), torch.tensor([0, 2, 5])
    seq_idx = torch.tensor([[0, 0, 1, 1, -1]] * 2, dtype=torch.int32)
    return {
        "defaults": (library.forward, trained[:2]),
        "everything": (library.forward, (*trained, None, None, 1)),
        "along_tokens": (library.forward, (*leaves(along), None, None, 1)),
        "packed": (library.forward, (*row[:3], None, cu_seqlens)),
        "numbered": (library.forward, (*trained[:3], None, None, seq_idx, 1)),
        "state_everything": (library.forward_with_state, (*trained, None, None, 1)),
        "state_along_tokens": (library.forward_with_state, (*leaves(along), None, None, 1)),
        "state_packed": (library.forward_with_state, (*row[:3], None, cu_seqlens)),
        "backward_defaults": (library.backward, (dy, None, *given[:2])),
        "backward_everything": (library.backward, (dy, given[3], *along, None, None, 1)),
        "step_defaults": (library.step, (*given[:3], given[3])),
        "step_everything": (
            library.step, (given[0][:, 0], *given[1:], torch.tensor([1, 0]), torch.tensor([3, 4]), 1),
        ),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", opcheck_cases())
def test_opcheck(case):
    operator, arguments = opcheck_cases()[case]
    result = torch.library.opcheck(operator, tuple(arguments))
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("layout", ["btd", "bdt"])
def test_gradcheck(layout, activation):
    x, weight, bias, state = small(1, 4, 2)
    if layout == "bdt":
        x, state = x.transpose(1, 2).contiguous(), state.transpose(1, 2).contiguous()

    def function(x, weight, bias, state):
        return tfla.causal_conv1d(
            x, weight, bias, activation=activation, initial_state=state, output_final_state=True, layout=layout
        )

    assert torch.autograd.gradcheck(function, leaves((x, weight, bias, state)))


def test_one_result_is_used():
    for part in (0, 1):
        mine, theirs = leaves(small()), leaves(small())
        tfla.causal_conv1d(*mine[:3], initial_state=mine[3], output_final_state=True)[part].square().sum().backward()
        conv_reference(*theirs[:3], state=theirs[3])[part].square().sum().backward()
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x.grad, torch.zeros_like(x) if y.grad is None else y.grad)


def test_double_backward_and_forward_mode_are_refused():
    x, weight, bias, _ = leaves(small())
    (dx,) = torch.autograd.grad(tfla.causal_conv1d(x, weight, bias).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="^tfla: causal_conv1d was asked for a second derivative"):
        dx.sum().backward()
    given = tuple(small()[:3])
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(tfla.causal_conv1d, given, given)


@pytest.mark.parametrize("layout", ["btd", "bdt"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, layout):
    def function(x, weight, bias, state):
        y, last = tfla.causal_conv1d(
            x, weight, bias, activation="silu", initial_state=state, output_final_state=True, layout=layout
        )
        return (y * 2).sum() + last.square().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 8):
        given = small(tokens=tokens)
        if layout == "bdt":
            given = [x.transpose(1, 2).contiguous() if x.dim() == 3 else x for x in given]
        mine, theirs = leaves(given), leaves(given)
        found, wanted = compiled(*mine), function(*theirs)
        assert torch.equal(found, wanted)
        found.backward()
        wanted.backward()
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(mine, theirs, strict=True))


def test_compiled_step():
    x, weight, bias, state = small()
    mine, theirs = state.clone(), state.clone()
    compiled = torch.compile(tfla.causal_conv1d_step, fullgraph=True, backend="aot_eager")
    for t in range(3):
        assert torch.equal(
            compiled(x[:, t], mine, weight, bias, activation="silu"),
            tfla.causal_conv1d_step(x[:, t], theirs, weight, bias, activation="silu"),
        )
    assert torch.equal(mine, theirs)


def test_autocast_leaves_dtypes_alone():
    x, weight, bias, _ = small(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tfla.causal_conv1d(x, weight, bias), conv_of := tfla.causal_conv1d(x, weight, bias))
        assert conv_of.dtype == torch.float32


def test_func_grad_and_vmap():
    """Gradients per sample are those of each by itself, of weight and bias too."""

    def loss(x, weight, bias, state):
        y, last = tfla.causal_conv1d(
            x[None], weight, bias, activation="silu", initial_state=state[None], output_final_state=True
        )
        return y.square().sum() + last.sum()

    x, weight, bias, state = small()
    everything = (0, 1, 2, 3)
    found = torch.func.vmap(torch.func.grad(loss, everything), (0, None, None, 0))(x, weight, bias, state)
    for row in range(2):
        wanted = torch.func.grad(loss, everything)(x[row], weight, bias, state[row])
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine[row], theirs, rtol=1e-12, atol=1e-12)


def test_vmap():
    x, weight, bias, state = small()
    xs = torch.stack([x, 2 * x, -x], dim=1)
    found = torch.func.vmap(lambda x: tfla.causal_conv1d(x, weight, bias, activation="silu"), in_dims=1)(xs)
    wanted = [tfla.causal_conv1d(xs[:, n], weight, bias, activation="silu") for n in range(3)]
    assert torch.equal(found, torch.stack(wanted))
    states = torch.stack([state, state + 1, state - 1], dim=2)
    mine = states.clone()
    found = torch.func.vmap(
        lambda x, state: tfla.causal_conv1d_step(x, state, weight, bias), in_dims=(1, 2)
    )(xs, mine)  # fmt: skip
    for n in range(3):
        one = states[:, :, n].clone()
        assert torch.equal(found[n], tfla.causal_conv1d_step(xs[:, n], one, weight, bias))
        assert torch.equal(mine[:, :, n], one)


def test_vmap_refuses_what_belongs_to_one_call():
    x, weight, bias, state = small(1)
    bounds = torch.tensor([[0, 5], [0, 4]])
    with pytest.raises(ValueError, match="tfla: cu_seqlens is batched by vmap"):
        torch.func.vmap(lambda c: tfla.causal_conv1d(x, weight, bias, cu_seqlens=c))(bounds)
    with pytest.raises(ValueError, match="tfla: the state is not batched by vmap"):
        torch.func.vmap(lambda x: tfla.causal_conv1d_step(x, state, weight, bias))(x.expand(2, *x.shape))
