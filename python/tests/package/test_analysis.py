"""tfla.analysis: the paper's worked numbers, and closed forms against a search."""

import math

import pytest

from tfla import analysis
from tfla.analysis import Accelerator, Model


def test_intensities_of_the_paper():
    rounded = {m.name: int(m.intensity) for m in analysis.accelerators()}
    for name, intensity in {"V100": 133, "A100": 161, "H100": 295, "B200": 292}.items():
        (found,) = (value for key, value in rounded.items() if key.startswith(name))
        assert abs(found - intensity) <= 1


def test_flop_optimal_chunk_is_16_at_512():
    best = analysis.flop_optimal_chunk(Model(dqk=256, dhv=512))
    assert 2 ** round(math.log2(best)) == 16


@pytest.mark.parametrize("gate", ["exp", "sig"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_best_chunk_is_where_the_time_is_least(gate, direction, overlapped):
    model = Model(gate=gate, direction=direction, dqk=128, dhv=256)
    machine = Accelerator("here", 2026, flops=4e14, bandwidth=2e12)
    flops, moved = analysis.counts(model)

    def time(chunk: float) -> float:
        parts = (flops(chunk) / machine.flops / chunk, moved(chunk) / machine.bandwidth / chunk)
        return max(parts) if overlapped else sum(parts)

    best = analysis.best_chunk(model, machine, overlapped=overlapped)
    grid = [2 ** (x / 50) for x in range(0, 700)]
    assert time(best) <= min(map(time, grid)) * (1 + 1e-9)


def test_exponential_gate_costs_about_two_percent_more_at_64():
    def flops(gate: str) -> float:
        model = Model(gate=gate, dqk=64, dhv=64)
        return analysis.total(analysis.counts(model)[0], model, tokens=8192, chunk=128)

    assert 0.01 < flops("exp") / flops("sig") - 1 < 0.03


def test_totals_add_up():
    model = Model(formulation="chunkwise")
    flops, _ = analysis.counts(model)
    whole = analysis.total(flops, model, tokens=1024, chunk=128, batch=2, heads=3)
    assert whole == pytest.approx(2 * 3 * 8 * flops(128))


def test_roofline_is_memory_then_arithmetic():
    machine = Accelerator("m", 2026, flops=100.0, bandwidth=10.0)
    assert analysis.roofline(machine, 5) == 50
    assert analysis.roofline(machine, 20) == 100


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: analysis.counts(Model(gate="tanh")), "gate"),
        (lambda: analysis.counts(Model(dqk=0)), "dqk"),
        (lambda: analysis.counts(Model(formulation="recurrent", direction="backward")), "recurrent"),
        (lambda: analysis.accelerator("abacus"), "abacus"),
        (lambda: analysis.total(analysis.counts(Model())[0], Model(), tokens=-1, chunk=64), "tokens"),
    ],
)
def test_bad_input_is_one_sentence(call, named):
    with pytest.raises(ValueError, match=named) as reason:
        call()
    assert "\n" not in str(reason.value)
