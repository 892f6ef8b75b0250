"""tfla.jax.ssd and ssd_step against the recurrence in float64, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tfla.jax
from ssd_inputs import BATCH, HEADS, TOKENS, N, P, at, extras, leaves, naive, tensors, wide
from tfla.reference import BOUNDS, relative_error

jax.config.update("jax_enable_x64", True)

OPTIONS = [(), ("D2", "z", "dt_bias"), ("D", "z", "dt_bias", "state", "limit")]


def of_torch(x):
    dtype = str(x.dtype).removeprefix("torch.")
    return jnp.asarray(x.double().numpy() if x.is_floating_point() else x.numpy(), dtype)


def to_torch(x):
    return torch.tensor(np.asarray(x, np.float64))


def arrays(given):
    return {("initial_state" if name == "state" else name): of_torch(x) for name, x in given.items()}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("names", OPTIONS, ids=str)
def test_values_and_gradients(names, dtype):
    given, limit = tensors(dtype) | extras(dtype, names), (0.1, 1.5) if "limit" in names else (0.0, float("inf"))
    options = {"dt_softplus": True, "dt_limit": limit, "chunk_size": 16, "output_final_state": True}
    wanted = leaves(given, torch.float64)
    expected, expected_S = naive(**wanted, softplus=True, limit=limit)
    mine = arrays(given)
    (y, S), pull = jax.vjp(jax.jit(lambda xs: tfla.jax.ssd(**xs, **options)), mine)
    value, grad = BOUNDS[dtype]
    roundings = 2 if "D" in given or "z" in given else 1
    assert y.dtype == mine["x"].dtype and S.shape == (BATCH, HEADS, P, N)
    assert relative_error(to_torch(y), expected) < roundings * value
    assert relative_error(to_torch(S), expected_S) < BOUNDS[wide(dtype)][0]
    generator = torch.Generator().manual_seed(2)
    dy = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(dtype)
    dS = torch.randn(expected_S.shape, generator=generator, dtype=torch.float64)
    (grads,) = pull((of_torch(dy), jnp.asarray(dS.numpy(), S.dtype)))
    torch.autograd.backward([expected, expected_S], [dy.double(), to_torch(jnp.asarray(dS.numpy(), S.dtype))])
    for name, x in wanted.items():
        found = grads["initial_state" if name == "state" else name]
        assert relative_error(to_torch(found), x.grad) < roundings * grad, name


def test_packed_sequences_and_seq_idx():
    given = tensors(torch.float64, batch=1) | extras(torch.float64, ("D", "z"), batch=1)
    bounds = jnp.asarray([0, 5, 5, 30])
    y, S = tfla.jax.ssd(**arrays(given), dt_softplus=True, cu_seqlens=bounds, output_final_state=True)
    expected, last = naive(**at(given, slice(5, 30)), softplus=True)
    assert relative_error(to_torch(y[:, 5:30]), expected) < 1e-10 and not y[:, 30:].any() and not S[1].any()
    assert relative_error(to_torch(S[2:]), last) < 1e-10
    numbers = jnp.where(jnp.arange(TOKENS) < 5, 0, 3)[None]
    other = tfla.jax.ssd(**arrays(given), dt_softplus=True, seq_idx=numbers)
    assert relative_error(to_torch(other[:, 5:30]), expected) < 1e-10


def test_padding_is_no_part_of_gradients():
    given = tensors(torch.float64, batch=1) | extras(torch.float64, ("D", "z", "dt_bias"), batch=1)
    for name in ("x", "dt", "B", "C", "z"):
        given[name][:, 30:] = float("nan")
    bounds = jnp.asarray([0, 5, 5, 30])
    y, pull = jax.vjp(lambda xs: tfla.jax.ssd(**xs, dt_softplus=True, cu_seqlens=bounds), arrays(given))
    assert not y[:, 30:].any()
    for name, found in pull(jnp.ones_like(y))[0].items():
        assert jnp.isfinite(found).all(), name
        assert found.ndim < 3 or not found[:, 30:].any(), name


@pytest.mark.parametrize("edge", [0.0, 0.5])
def test_time_steps_at_a_limit_have_a_slope(edge):
    given = tensors(torch.float64, positive_dt=True)
    given["dt"][:, ::3] = edge
    wanted, limit = leaves(given), (0.0, 0.5 if edge else float("inf"))
    naive(**wanted, limit=limit)[0].square().sum().backward()
    grads = jax.grad(lambda xs: jnp.square(tfla.jax.ssd(**xs, dt_limit=limit)).sum())(arrays(given))
    for name, x in wanted.items():
        assert relative_error(to_torch(grads[name]), x.grad) < 1e-9, name


def test_vmap_is_a_larger_batch():
    given = arrays(tensors(torch.float64) | extras(torch.float64, ("z",)))
    rates = jnp.stack([given["A"], given["A"] / 2])
    found = jax.vmap(lambda A: tfla.jax.ssd(**(given | {"A": A}), dt_softplus=True))(rates)
    for mine, A in zip(found, rates, strict=True):
        wanted = tfla.jax.ssd(**(given | {"A": A}), dt_softplus=True)
        assert relative_error(to_torch(mine), to_torch(wanted)) < 1e-12


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16], ids=str)
def test_steps_are_the_sequence(dtype):
    given = tensors(torch.float64) | extras(torch.float64, ("D", "z", "dt_bias"))
    expected, last = naive(**given, softplus=True)
    S, rows = jnp.zeros((BATCH, HEADS, P, N), dtype), []
    for t in range(TOKENS):
        y, S = tfla.jax.ssd_step(**arrays(at(given, t)), state=S, dt_softplus=True)
        rows.append(y)
    bound = 1e-12 if dtype == jnp.float64 else 3e-2  # a state of 16 bits is rounded after every step
    assert S.dtype == dtype and relative_error(to_torch(jnp.stack(rows, 1)), expected) < bound
    assert relative_error(to_torch(S), last) < bound


REFUSED = [
    ({"x": jnp.zeros((TOKENS, HEADS))}, r"x has shape \(41, 4\)"),
    ({"dt": jnp.zeros((BATCH, TOKENS, 1))}, r"dt has shape \(2, 41, 1\); it must be \(2, 41, 4\)"),
    ({"A": jnp.zeros(HEADS + 1)}, r"A has shape \(5,\)"),
    ({"B": jnp.zeros((BATCH, TOKENS, 3, N))}, "B has shape"),
    ({"C": jnp.zeros((BATCH, TOKENS, 1, N))}, "C has shape"),
    ({"B": jnp.zeros((BATCH, TOKENS, 2, N), jnp.bfloat16)}, "B is bfloat16; it must be float32, the dtype of x"),
    ({"D": jnp.zeros((HEADS, P + 1))}, r"D has shape \(4, 7\); it must be \(4,\) or \(4, 6\)"),
    ({"dt_limit": (-1.0, 1.0)}, "dt_limit is"),
    ({"seq_idx": jnp.zeros((BATCH, TOKENS))}, "seq_idx has shape"),
    ({"initial_state": jnp.zeros((BATCH, HEADS, N, P))}, "initial_state has shape"),
    ({"chunk_size": 0}, "chunk_size is 0"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(change, sentence):
    with pytest.raises(ValueError, match=f"tfla: {sentence}"):
        tfla.jax.ssd(**(arrays(tensors(torch.float32)) | change))
