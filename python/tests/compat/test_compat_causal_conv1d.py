"""The functions of the package causal_conv1d against plain PyTorch in float64, on kernels and where there are none."""

import pytest
import torch
import torch.nn.functional as F

from tfla.compat import causal_conv1d as compat
from tfla.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from tfla.reference import relative_error

DOUBLE = torch.float64
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def path(request, monkeypatch):
    """The code for devices without kernels runs on any device."""
    if request.param == "torch":
        monkeypatch.setattr(compat, "_has_kernels", lambda x: False)
    return request.param


def make(tokens, dtype, channel_last=False, width=4, batch=2, dim=12, states=False):
    """A slice of a wider projection, as layers have it; weights are float32."""
    numbers = torch.Generator().manual_seed(11)
    whole = torch.randn(batch, tokens, 3 * dim, generator=numbers)
    x = whole[:, :, dim : 2 * dim].transpose(1, 2)
    x = x if channel_last else x.contiguous()
    initial = torch.randn(batch, dim, width - 1, generator=numbers).to(dtype) if states else None
    weight, bias = torch.randn(dim, width, generator=numbers), torch.randn(dim, generator=numbers)
    return x.to(dtype), weight, bias, initial


def formula(x, weight, bias=None, initial=None, activation=None):
    """By F.conv1d in float64."""
    dim, width = weight.shape
    x = torch.cat([x.new_zeros(x.shape[0], dim, width - 1) if initial is None else initial, x], dim=2)
    y = F.conv1d(x, weight.unsqueeze(1), bias, groups=dim)
    return (y if activation is None else F.silu(y)), x[:, :, x.shape[2] - width + 1 :]


def leaves(given, dtype=None):
    return [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in given]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 151])
@pytest.mark.parametrize("states", [False, True])
def test_fn(states, tokens, activation, channel_last, dtype):
    given = make(tokens, dtype, channel_last, states=states)
    mine, theirs = leaves(given), leaves(given, DOUBLE)
    y, last = causal_conv1d_fn(*mine[:3], None, mine[3], return_final_states=True, activation=activation)
    wanted, wanted_last = formula(*theirs, activation)
    assert y.dtype == last.dtype == dtype and y.shape == given[0].shape
    (y.square().sum() + last.sum()).backward()
    (wanted.square().sum() + wanted_last.sum()).backward()
    assert relative_error(y, wanted) < BOUNDS[dtype] and torch.equal(last.double(), wanted_last)
    for x, z in zip(mine, theirs, strict=True):
        assert x is None or relative_error(x.grad, z.grad) < 3 * BOUNDS[dtype]


@pytest.mark.parametrize("width", [2, 3, 4])
def test_without_bias_and_with_somebody_elses_memory(width):
    x, weight, _, _ = make(20, torch.float32, width=width)
    out = torch.empty(2, 12, width - 1)
    y, last = causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=out)
    wanted, wanted_last = formula(x.double(), weight.double())
    assert last.data_ptr() == out.data_ptr() and torch.equal(out.double(), wanted_last)
    assert relative_error(y, wanted) < 1e-6 and torch.equal(y, causal_conv1d_fn(x, weight))


def test_seq_idx_keeps_sequences_apart_and_skips_padding():
    x, weight, bias, _ = make(40, torch.float32, True)
    bounds = ([0, 7, 8, 30], [0, 21, 40])
    seq_idx = torch.full((2, 40), -1, dtype=torch.int32)
    mine, theirs = leaves((x, weight, bias)), leaves((x, weight, bias), DOUBLE)
    rows = []
    for row, ends in enumerate(bounds):
        for number, (a, b) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            seq_idx[row, a:b] = number
        parts = [
            formula(theirs[0][row : row + 1, :, a:b], *theirs[1:], None, "silu")[0]
            for a, b in zip(ends[:-1], ends[1:], strict=True)
        ]
        rows.append(F.pad(torch.cat(parts, dim=2), (0, 40 - ends[-1])))
    y, wanted = causal_conv1d_fn(*mine, seq_idx, activation="silu"), torch.cat(rows)
    for z in (y, wanted):
        z.square().sum().backward()
    assert relative_error(y, wanted) < 1e-6 and not y[0, :, 30:].any()
    assert all(relative_error(a.grad, b.grad) < 1e-6 for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("count", [None, 1, 4])
@pytest.mark.parametrize("length", [3, 5])
def test_update(length, count, indexed, ring, dtype):
    """Three calls are the whole sequence; padding and the states of others stay as they are."""
    x, weight, bias, _ = make(3 * (count or 1), dtype, True, batch=4)
    indices = torch.tensor([6, -1, 0, 3], dtype=torch.int32) if indexed else None
    pool = torch.zeros(8 if indexed else 4, 12, length, dtype=dtype)
    pool[1:3] += 9 if indexed else 0
    wanted = formula(x.double(), weight.double(), bias.double(), None, "silu")[0]
    parts = []
    for n in range(3):
        step = x[:, :, n] if count is None else x[:, :, n * count : (n + 1) * count]
        done = torch.full((4,), n * (count or 1), dtype=torch.int32) if ring else None
        y = causal_conv1d_update(step, pool, weight, bias, "silu", done, indices)
        assert y.shape == step.shape and y.dtype == dtype
        parts.append(y.unsqueeze(2) if count is None else y)
    found, rows = torch.cat(parts, dim=2), torch.tensor([0, 2, 3]) if indexed else torch.arange(4)
    assert relative_error(found[rows], wanted[rows]) < BOUNDS[dtype]
    last = F.pad(x, (length, 0))[:, :, -length:]
    if ring:
        last = last.roll(x.shape[2] % length, dims=2)
    assert torch.equal(pool[indices[rows].long()] if indexed else pool, last[rows])
    if indexed:
        assert not found[1].any() and (pool[1:3] == 9).all() and not pool[[4, 5, 7]].any()


def test_update_takes_parameters():
    """As where a model decodes outside of no_grad."""
    x, weight, bias, _ = make(1, torch.float32)
    y = causal_conv1d_update(x, torch.zeros(2, 12, 3), weight.requires_grad_(), bias)
    assert not y.requires_grad


def test_refused():
    x, weight, _, states = make(5, torch.float32, states=True)
    seq_idx = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="tfla: activation is 'relu'"):
        causal_conv1d_fn(x, weight, activation="relu")
    with pytest.raises(NotImplementedError, match="tfla: activation is 'relu'"):
        causal_conv1d_update(x, states, weight, activation="relu")
    for options in ({"initial_states": states}, {"return_final_states": True}):
        with pytest.raises(ValueError, match="tfla: seq_idx is given with initial_states or return_final_states"):
            causal_conv1d_fn(x, weight, None, seq_idx, **options)
