"""tfla.mlstm_step: tokens on states in place, against the recurrence in float64."""

import pytest
import torch

import tfla
from inputs import make_inputs, make_state
from tfla.reference import BOUNDS, recurrence, relative_error

BATCH, HEADS, DQK, DHV = 3, 2, 8, 12
VARIANTS = [
    {},
    {"normalizer": "none"},
    {"gate": "sigmoid"},
    {"gate": "sigmoid", "normalizer": "max"},
    {"qk_scale": 0.5, "eps": 1e-3, "soft_cap": 5.0},
]


def state_for(options, sequences=BATCH, dtype=torch.float32):
    return tfla.State(*make_state(sequences, HEADS, DQK, DHV, dtype, m=0.0 if "gate" in options else 0.3))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_token_by_token(options, dtype):
    tokens = make_inputs(BATCH, 5, HEADS, DQK, DHV, qk_heads=1, dtype=dtype)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    state = state_for(options, dtype=state_dtype)
    wanted, wanted_state = recurrence(*tokens, state=tuple(state.clone()), **options)
    addresses = [x.data_ptr() for x in state]
    h = torch.stack([tfla.mlstm_step(*(x[:, t] for x in tokens), state, **options) for t in range(5)], dim=1)
    assert h.dtype == dtype and h.shape == wanted.shape
    assert relative_error(h, wanted) < BOUNDS[dtype][0]
    assert addresses == [x.data_ptr() for x in state]
    for name, x, y in zip("Cnm", state, wanted_state, strict=True):
        assert relative_error(x, y) < BOUNDS[state_dtype][0], name


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_several_tokens(layout):
    tokens = make_inputs(BATCH, 4, HEADS, DQK, DHV)
    state = state_for({})
    wanted, wanted_state = recurrence(*tokens, state=tuple(state.clone()))
    given = tokens if layout == "bthd" else tokens.map(lambda x: x.transpose(1, 2))
    h = tfla.mlstm_step(*given, state, layout=layout)
    assert relative_error(h if layout == "bthd" else h.transpose(1, 2), wanted) < 1e-5
    assert relative_error(state.C, wanted_state[0]) < 1e-5


def test_one_token_has_no_layout():
    """Without an axis of tokens both are (B,H,D)."""
    tokens = make_inputs(BATCH, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0])
    one, other = state_for({}), state_for({})
    assert torch.equal(tfla.mlstm_step(*tokens, one), tfla.mlstm_step(*tokens, other, layout="bhtd"))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_touch_their_states_alone(dtype):
    tokens = make_inputs(2, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0])
    pool = state_for({}, sequences=6)
    before = pool.clone()
    slots = torch.tensor([4, 1], dtype=dtype)
    h = tfla.mlstm_step(*tokens, pool, slots=slots)
    wanted, after = recurrence(*tokens.map(lambda x: x[:, None]), state=tuple(before.rows([4, 1])))
    assert relative_error(h, wanted[:, 0]) < 1e-5
    for x, y, z in zip(pool, before, after, strict=True):
        assert relative_error(x[[4, 1]], z) < 1e-5
        assert torch.equal(x[[0, 2, 3, 5]], y[[0, 2, 3, 5]])


def test_recurrent_is_the_step_over_a_sequence():
    """Bit for bit without a denominator; n is rounded after each call of the step. Chunks sum up in another order."""
    given, options = make_inputs(BATCH, 30, HEADS, DQK, DHV), {"normalizer": "none"}
    state = tfla.State.zeros(BATCH, HEADS, DQK, DHV)
    steps = [tfla.mlstm_step(*given.map(lambda x, t=t: x[:, t]), state, **options) for t in range(30)]
    assert torch.equal(tfla.mlstm_recurrent(*given, **options), torch.stack(steps, dim=1))
    assert not torch.equal(tfla.mlstm(*given, **options), torch.stack(steps, dim=1))


def test_prefill_then_decode_is_the_whole_sequence():
    whole = make_inputs(BATCH, 30, HEADS, DQK, DHV)
    wanted = tfla.mlstm(*whole)
    h, state = tfla.mlstm(*whole.map(lambda x: x[:, :23]), output_final_state=True)
    rest = [tfla.mlstm_step(*whole.map(lambda x, t=t: x[:, t]), state) for t in range(23, 30)]
    assert relative_error(torch.cat([h, torch.stack(rest, dim=1)], dim=1), wanted) < 1e-5


def test_gradients_are_refused():
    tokens = make_inputs(BATCH, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0]).leaves()
    with pytest.raises(RuntimeError, match="mlstm_step was given a tensor that requires a gradient"):
        tfla.mlstm_step(*tokens, state_for({}))
    with torch.inference_mode():
        tfla.mlstm_step(*tokens, state_for({}))
    C, n, m = state_for({})
    with pytest.raises(RuntimeError, match="mlstm_step was given a tensor that requires a gradient"):
        tfla.mlstm_step(*tokens.map(torch.Tensor.detach), (C, n.requires_grad_(), m))


def test_compiled():
    tokens = make_inputs(BATCH, 1, HEADS, DQK, DHV).map(lambda x: x[:, 0])
    eager, compiled = state_for({}), state_for({})
    step = torch.compile(tfla.mlstm_step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(tfla.mlstm_step(*tokens, eager), step(*tokens, compiled))
    assert all(torch.equal(x, y) for x, y in zip(eager, compiled, strict=True))


def test_state_is_saved_sliced_and_moved(tmp_path):
    state = state_for({}, sequences=4)
    torch.save(state._asdict(), tmp_path / "state.pt")
    loaded = tfla.State(**torch.load(tmp_path / "state.pt"))
    assert all(torch.equal(x, y) for x, y in zip(state, loaded, strict=True))
    assert state.rows(2).C.shape == (1, HEADS, DQK, DHV) and torch.equal(state.rows(-1).m, state.m[3:])
    assert torch.equal(state.rows([3, 0]).n, state.n[[3, 0]])
    assert state.rows(slice(1, 3)).C.data_ptr() == state.C[1].data_ptr()
    assert state.to(torch.float64).C.dtype == torch.float64 and state.to("meta").n.device.type == "meta"
    state.rows(slice(0, 1)).copy_(state.rows(slice(1, 2)))
    assert torch.equal(state.C[0], state.C[1])
    state.reset_([1, 2])
    assert not state.C[1:3].any() and not state.m[1:3].any() and state.C[3].any()
