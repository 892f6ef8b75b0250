"""tfla.compat.mamba's selective_state_update against its formula in float64."""

import pytest
import torch
import torch.nn.functional as F

import tfla
from ssd_inputs import GROUPS as G
from ssd_inputs import HEADS as H
from ssd_inputs import N, P
from tfla.compat.mamba import selective_state_update
from tfla.reference import relative_error


def update_naive(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, softplus=False):
    """With heads; the state after it is returned."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))
    after = state * torch.exp(dt[..., None] * A) + (dt * x)[..., None] * B[:, :, None]
    y = (after * C[:, :, None]).sum(-1)
    y = y if D is None else y + D * x
    return (y if z is None else y * F.silu(z)), after


def update_arguments(tied: bool, dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    per_head = (lambda *rows: draw(*rows)[..., None].expand(*rows, P)) if tied else (lambda *rows: draw(*rows, P))
    return {
        "state": draw(3, H, P, N), "x": draw(3, H, P), "dt": per_head(3, H),
        "A": -per_head(H).exp()[..., None].expand(H, P, N) if tied else -draw(H, P).exp()[..., None].expand(H, P, N),
        "B": draw(3, G, N), "C": draw(3, G, N), "D": draw(H, P), "z": draw(3, H, P), "dt_bias": per_head(H),
    }  # fmt: skip


def expanded(given):
    """A as Mamba-2's step makes it: a view with stride 0 along P too."""
    return given | {"A": given["A"][:, :1, :1].expand(H, P, N)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("without", [(), ("D", "z"), ("dt_bias",)], ids=str)
def test_state_update(tied, without, monkeypatch):
    given = update_arguments(tied)
    given = expanded(given) if tied else given
    given |= dict.fromkeys(without)
    heads, operator = [], tfla.ssd_step
    monkeypatch.setattr(tfla, "ssd_step", lambda x, *xs, **named: heads.append(x.shape[1]) or operator(x, *xs, **named))
    expected, after = update_naive(**given, softplus=True)
    out = selective_state_update(**given, dt_softplus=True)
    assert out.shape == given["x"].shape and heads == [H if tied else H * P]
    assert relative_error(out, expected) < 1e-12 and relative_error(given["state"], after) < 1e-12


@pytest.mark.parametrize("own", ["A", "dt", "dt_bias"])
def test_one_of_the_three_that_differs_within_a_head(own):
    """Then every channel has a decay of its own, though the other two are expanded views."""
    given = expanded(update_arguments(True)) | {own: update_arguments(False)[own]}
    expected, after = update_naive(**given, softplus=True)
    assert relative_error(selective_state_update(**given, dt_softplus=True), expected) < 1e-12
    assert relative_error(given["state"], after) < 1e-12


def test_state_update_of_a_state_that_is_not_contiguous():
    given = update_arguments(False)
    expected, after = update_naive(**given, softplus=True)
    given["state"] = given["state"].transpose(1, 2).contiguous().transpose(1, 2)
    assert relative_error(selective_state_update(**given, dt_softplus=True), expected) < 1e-12
    assert relative_error(given["state"], after) < 1e-12


def test_state_update_without_heads():
    """Channels (B,D) with a state (B,D,N) each, and A the same numbers along N without being a view."""
    given = update_arguments(False)
    flat = {name: x.flatten(1, 2) if name in ("state", "x", "dt", "z") else x for name, x in given.items()}
    flat |= {name: given[name].flatten() for name in ("D", "dt_bias")} | {"A": given["A"].reshape(H * P, N).clone()}
    flat |= {name: given[name][:, 0] for name in "BC"}
    given |= {name: given[name][:, :1] for name in "BC"}
    expected, after = update_naive(**given, softplus=True)
    out = selective_state_update(**flat, dt_softplus=True)
    assert out.shape == (3, H * P) and relative_error(out, expected.flatten(1)) < 1e-12
    assert relative_error(flat["state"], after.flatten(1, 2)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_update_in_slots(dtype):
    given = expanded(update_arguments(True, torch.float32))
    given |= {"state": given["state"].to(dtype), "x": given["x"].bfloat16(), "z": None}
    pool = torch.randn(5, H, P, N).to(dtype)
    before, slots = pool.clone(), torch.tensor([4, -1, 0], dtype=torch.int32)
    pool[[4, 0]] = given["state"][[0, 2]]
    before[[4, 0]] = given["state"][[0, 2]]
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    expected, after = update_naive(**exact, softplus=True)
    out = selective_state_update(**(given | {"state": pool}), dt_softplus=True, state_batch_indices=slots)
    assert out.dtype == torch.bfloat16 and not out[1].any()
    assert relative_error(out[[0, 2]], expected[[0, 2]]) < 2.0**-7  # B and C are rounded to the dtype of x
    assert relative_error(pool[[4, 0]], after[[0, 2]]) < 2.0**-7 and torch.equal(pool[1:4], before[1:4])


UPDATE_REFUSED = [
    ({"A": -torch.rand(H, P, N)}, "A varies along its last axis, as in Mamba-1"),
    ({"A": -torch.rand(H)}, "A has shape"),
    ({"dt": torch.rand(3, H)}, "dt has shape"),
    ({"D": torch.rand(H)}, "D has shape"),
    ({"dt_bias": torch.rand(H)}, "dt_bias has shape"),
    ({"state": torch.rand(3, H)}, "state has shape"),
    ({"state_batch_indices": torch.tensor([0, 0, 1])}, "slots is"),
]


@pytest.mark.parametrize(("change", "sentence"), UPDATE_REFUSED, ids=[sentence for _, sentence in UPDATE_REFUSED])
def test_state_update_refused(change, sentence):
    given = update_arguments(True, torch.float32)
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        selective_state_update(**(given | change))
