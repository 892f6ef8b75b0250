"""tfla.jax on a GPU against the recurrence in float64 numpy; skipped where JAX sees none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tfla.jax
from numpy_reference import mlstm as reference
from numpy_reference import relative_error
from test_jax import DHV, DQK, B, H, T, make_inputs, make_state, normals


def gpus():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


pytestmark = pytest.mark.skipif(not gpus(), reason="JAX sees no GPU")
# 16-bit products are rounded on the way there; these are the errors of the paper's kernels at gates like these.
BOUNDS = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-4), "bfloat16": (1.1e-2, 4.2e-2)}
GATES = (0.0, 0.0, 0.0, -2.0, 4.5)  # means of q, k, v and the gates
STATES = {"float64": "float64", "float32": "float32", "bfloat16": "float32"}


def on_gpu(xs):
    return jax.device_put(xs, gpus()[0])


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("options", [{}, {"gate": "sigmoid"}, {"gate": "log"}, {"keep": "states"}], ids=str)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_values_and_gradients(dtype, options, layout):
    arrays, state = make_inputs(dtype, gate=options.get("gate", "exp")), make_state(dtype=STATES[dtype])
    dh, dC = normals(arrays[2].shape, dtype), normals((B, H, DQK, DHV), STATES[dtype], 3)
    order = (lambda x: jnp.swapaxes(x, 1, 2)) if layout == "bhtd" else (lambda x: x)

    @jax.jit
    def run(arrays, state, dh, dC):
        def loss(arrays, state):
            h, last = tfla.jax.mlstm(
                *map(order, arrays), initial_state=state, output_final_state=True, layout=layout, **options
            )
            h = order(h)
            return (h.astype(dC.dtype) * dh.astype(dC.dtype)).sum() + (last.C * dC).sum(), (h, last)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(arrays, state)

    (darrays, dstate), (h, last) = run(*on_gpu((arrays, state, dh, dC)))
    assert h.devices() == {gpus()[0]}
    h_ref, last_ref, grads = reference(
        *arrays, state, dh=dh, dstate=(dC, jnp.zeros((B, H, DQK))), gate=options.get("gate", "exp")
    )
    bound, grad_bound = BOUNDS[dtype]
    assert relative_error(h, h_ref) < bound
    for name, x, y in zip("Cnm", last, last_ref, strict=True):
        assert relative_error(x, y) < bound, name
    for name, x in zip("qkvifCn", [*darrays, *dstate[:2]], strict=True):
        assert relative_error(x, grads[name]) < grad_bound, name


def test_packed_sequences_under_vmap():
    arrays, packings = make_inputs("float64", batch=1), jnp.asarray([[0, 5, T], [0, 30, T]])
    together = jax.vmap(lambda packing: tfla.jax.mlstm(*on_gpu(arrays), cu_seqlens=packing))(on_gpu(packings))
    for number, packing in enumerate(packings):
        expected, *_ = reference(*arrays, cu_seqlens=packing)
        assert relative_error(together[number], expected) < 1e-10


def test_steps_in_place():
    arrays, state = make_inputs("float64"), make_state(dtype="float64")
    h_ref, last_ref, _ = reference(*arrays, state)
    decode = jax.jit(lambda state, *tokens: tfla.jax.mlstm_step(*tokens, state), donate_argnums=0)
    now, rows = jax.tree.map(jnp.copy, on_gpu(state)), []
    for t in range(T):
        h, now = decode(now, *on_gpu([x[:, t : t + 1] for x in arrays]))
        rows.append(h)
    assert relative_error(jnp.concatenate(rows, 1), h_ref) < 1e-10
    assert relative_error(now.C, last_ref[0]) < 1e-10


@pytest.mark.parametrize("keep", ["denominators", "states"])
@pytest.mark.parametrize("tokens", [100, 700])
def test_what_is_kept_on_hopper(keep, tokens):
    """bfloat16 heads of its own kernels, under jit and vmap: gradients of the recurrence in all of them."""
    rng = np.random.default_rng(5)
    shapes = [(2, tokens, 2, 64)] * 2 + [(2, tokens, 2, 128)] + [(2, tokens, 2)] * 2
    arrays = [
        jnp.asarray(rng.standard_normal(shape) + mean, "bfloat16") for shape, mean in zip(shapes, GATES, strict=True)
    ]
    dh = jnp.asarray(rng.standard_normal(shapes[2]), "bfloat16")

    def grads(dh, *arrays):
        return jax.vjp(lambda *xs: tfla.jax.mlstm(*xs, keep=keep), *arrays)[1](dh)

    together = jax.jit(grads)(*on_gpu((dh, *arrays)))
    rows = jax.jit(jax.vmap(grads))(*on_gpu([x[:, None] for x in (dh, *arrays)]))
    _, _, wanted = reference(*arrays, None, dh=dh)
    for name, x, y in zip("qkvif", together, rows, strict=True):
        assert relative_error(x, wanted[name]) < BOUNDS["bfloat16"][1], name
        assert relative_error(y[:, 0], wanted[name]) < BOUNDS["bfloat16"][1], name
