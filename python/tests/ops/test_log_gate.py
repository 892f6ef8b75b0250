"""gate="log": decays and input weights given as logarithms."""

import pytest
import torch
import torch.nn.functional as F

import tfla
from inputs import Inputs, make_inputs, make_state
from test_mlstm import FORMULATIONS, check
from tfla.reference import BOUNDS, relative_error


def log_gates(given: Inputs) -> Inputs:
    """The same decays, and input weights on both sides of 1."""
    i, f = (x.double() for x in (given.i, given.f))
    return Inputs(given.q, given.k, given.v, (0.5 * i + 1).to(given.i.dtype), F.logsigmoid(f).to(given.f.dtype))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_values_and_gradients(dtype, formulation, with_state):
    given = log_gates(make_inputs(qk_heads=1, dtype=dtype, gate_dtype=dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = make_state(2, 2, 8, 12, wide) if with_state else None
    check(FORMULATIONS[formulation], given, {"gate": "log"}, state=state)


def test_is_the_sigmoid_gate_with_its_sigmoids_taken_outside():
    given = make_inputs(dtype=torch.float64)
    h = tfla.mlstm(*given, gate="sigmoid")
    outside = Inputs(given.q, given.k, given.v, F.logsigmoid(given.i), F.logsigmoid(given.f))
    assert relative_error(tfla.mlstm(*outside, gate="log"), h) < 1e-12


def test_keeps_everything_and_nothing():
    q, k, v, _, _ = make_inputs(dtype=torch.float64)
    ones = torch.zeros(v.shape[:3], dtype=torch.float64)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    attention = torch.einsum("bhts,bshe->bthe", scores.tril(), v)
    assert relative_error(tfla.mlstm(q, k, v, ones, ones, gate="log"), attention) < 1e-10
    alone = torch.einsum("bhtt,bthe->bthe", scores, v)
    assert relative_error(tfla.mlstm(q, k, v, ones, ones - torch.inf, gate="log"), alone) < 1e-10


def test_step():
    given, state = log_gates(make_inputs(tokens=5)), make_state(2, 2, 8, 12)
    expected, last = tfla.mlstm(*given, gate="log", initial_state=state, output_final_state=True)
    mine = [x.clone() for x in state]
    h = torch.stack([tfla.mlstm_step(*(x[:, t] for x in given), mine, gate="log") for t in range(5)], 1)
    assert relative_error(h, expected) < 1e-5
    for x, y in zip(mine, last, strict=True):
        assert relative_error(x, y) < 1e-5
