"""tfla.jax.delta_rule against the recurrence in float64: values, gradients, and every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tfla.jax
from delta_inputs import PER_TOKEN, make_delta, make_delta_state, mapped
from numpy_reference import relative_error
from tfla.reference import BOUNDS, delta_recurrence

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 4)  # for shard_map

EVERYTHING = {"A_log": True, "dt_bias": True, "raw_beta": True}
ALL_OPTIONS = {"write": "twice_sigmoid", "normalize_qk": True, "qk_scale": 0.5}
# What is given, and options.
VARIANTS = [
    ({"g": False}, {}),
    ({}, {"chunk_size": 16}),
    ({"A_log": True}, {}),
    ({"raw_beta": True}, {"write": "sigmoid"}),
    (EVERYTHING, ALL_OPTIONS),
]


def of_torch(x):
    dtype = str(x.dtype).removeprefix("torch.")
    return jnp.asarray(x.double().numpy() if x.is_floating_point() else x.numpy(), dtype)


def to_torch(x):
    return torch.tensor(np.asarray(x, np.float64))


def make(dtype="float64", batch=2, tokens=37, **inputs):
    given = make_delta(batch, tokens, dtype=getattr(torch, dtype), **inputs)
    return {name: of_torch(x) for name, x in given.items()}


def make_state(sequences=2, dtype="float64"):
    return of_torch(make_delta_state(sequences, dtype=getattr(torch, dtype)))


def normals(shape, dtype="float64", seed=2):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def head_first(x):
    return jnp.swapaxes(x, 1, 2)


def reference(given, state, dh, dlast, **options):
    """h, the last state, and gradients by name; the state's as "state"."""
    leaves = {name: to_torch(x).requires_grad_() for name, x in given.items()}
    leaves["state"] = to_torch(state).requires_grad_()
    h, last = delta_recurrence(**leaves, **{name: x for name, x in options.items() if name != "chunk_size"})
    torch.autograd.backward([h, last], [to_torch(dh), to_torch(dlast)])
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return h.detach().numpy(), last.detach().numpy(), {name: x.numpy() for name, x in grads.items()}


def with_gradients(given, state, dh, dlast, **options):
    """The same of tfla.jax, under jit."""

    @jax.jit
    def run(given, state):
        def loss(given, state):
            h, last = tfla.jax.delta_rule(**given, initial_state=state, output_final_state=True, **options)
            return (h.astype(dlast.dtype) * dh.astype(dlast.dtype)).sum() + (last * dlast).sum(), (h, last)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(given, state)

    (grads, dstate), (h, last) = run(given, state)
    return h, last, {**grads, "state": dstate}


@pytest.mark.parametrize(("inputs", "options"), VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_values_and_gradients(dtype, inputs, options):
    given, wide = make(dtype, **inputs), "float64" if dtype == "float64" else "float32"
    call = (given, make_state(dtype=wide), normals((2, 37, 4, 12), dtype), normals((2, 4, 8, 12), wide, 3))
    h, last, grads = with_gradients(*call, **options)
    h_ref, last_ref, grads_ref = reference(*call, **options)
    bound, grad_bound = BOUNDS[getattr(torch, dtype)]
    state_bound = BOUNDS[getattr(torch, wide)]
    assert h.dtype == dtype and last.dtype == wide
    assert relative_error(h, h_ref) < bound and relative_error(last, last_ref) < state_bound[0]
    for name, x in grads.items():
        assert x.dtype == (wide if name == "state" else dtype)
        assert relative_error(x, grads_ref[name]) < (state_bound[1] if name == "state" else grad_bound), name


def test_without_states():
    given = make()
    h, grads = tfla.jax.delta_rule(**given), jax.grad(lambda x: (tfla.jax.delta_rule(**x) ** 2).sum())(given)
    h_ref, _, grads_ref = reference(given, 0 * make_state(), 2 * h, 0 * make_state())
    assert relative_error(h, h_ref) < 1e-10
    assert all(relative_error(x, grads_ref[name]) < 1e-10 for name, x in grads.items())


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_packed_sequences(index_dtype):
    """The tokens from 30 on are padding."""
    given, bounds = make(batch=1, **EVERYTHING), [0, 5, 5, 20, 30]
    state, dh, dlast = make_state(4), normals((1, 37, 4, 12)), normals((4, 4, 8, 12), seed=3)
    index = jnp.asarray(bounds, index_dtype)
    h, last, grads = with_gradients(given, state, dh, dlast, cu_seqlens=index, **ALL_OPTIONS)
    summed = {name: np.zeros(x.shape) for name, x in grads.items()}
    for s, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows, one = (slice(None), slice(begin, end)), slice(s, s + 1)
        part = mapped(lambda x, rows=rows: x[rows], given)
        h_ref, last_ref, grads_ref = reference(part, state[one], dh[rows], dlast[one], **ALL_OPTIONS)
        assert relative_error(h[rows], h_ref) < 1e-10 and relative_error(last[one], last_ref) < 1e-10
        for name, x in grads_ref.items():
            summed[name][rows if name in PER_TOKEN else one if name == "state" else ...] += x
    assert not h[:, 30:].any()
    for name, x in grads.items():
        assert relative_error(x, summed[name]) < 1e-10, name


def test_layout_bhtd_is_the_same_function():
    given, swapped = make(**EVERYTHING), mapped(head_first, make(**EVERYTHING))

    def run(given, **options):
        h, last = tfla.jax.delta_rule(**given, output_final_state=True, **options)
        return (h**2).sum() + (last**2).sum(), last

    grads, last = jax.grad(run, has_aux=True)(given)
    swapped_grads, swapped_last = jax.grad(lambda x: run(x, layout="bhtd"), has_aux=True)(swapped)
    np.testing.assert_array_equal(last, swapped_last)
    for name, x in mapped(head_first, swapped_grads).items():
        np.testing.assert_array_equal(x, grads[name])


@pytest.mark.parametrize("slots", [None, [4, 0]])
@pytest.mark.parametrize(("inputs", "options"), [VARIANTS[0], VARIANTS[-1]], ids=str)
def test_steps_equal_the_whole(inputs, options, slots):
    given, first = make(**inputs), make_state()
    rows = np.arange(2) if slots is None else np.array(slots)
    pool = make_state(2 if slots is None else 6).at[rows].set(first)
    untouched = np.setdiff1d(np.arange(len(pool)), rows)
    h_ref, last_ref = delta_recurrence(
        **{name: to_torch(x) for name, x in given.items()}, state=to_torch(first), **options
    )

    @jax.jit
    def decode(state, given):
        index = None if slots is None else jnp.asarray(slots)
        return tfla.jax.delta_rule_step(**given, state=state, slots=index, **options)

    state, h = pool, []
    for start, end in ((0, 1), (1, 2), (2, 10), (10, 37)):
        out, state = decode(state, mapped(lambda x, part=slice(start, end): x[:, part], given))
        h.append(out)
    assert relative_error(jnp.concatenate(h, 1), h_ref) < 1e-10
    assert relative_error(state[rows], last_ref) < 1e-10
    np.testing.assert_array_equal(state[untouched], pool[untouched])


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_step_of_one_token_without_its_axis(layout):
    given, state = make(**EVERYTHING), make_state()
    expected, after = tfla.jax.delta_rule_step(**mapped(lambda x: x[:, :1], given), state=state)
    h, last = tfla.jax.delta_rule_step(**mapped(lambda x: x[:, 0], given), state=state, layout=layout)
    np.testing.assert_array_equal(h, expected[:, 0])
    np.testing.assert_array_equal(last, after)


def test_step_leaves_its_argument_alone_and_uses_a_donated_one():
    given, state = mapped(lambda x: x[:, :1], make()), make_state()
    before = np.array(state)
    h, after = tfla.jax.delta_rule_step(**given, state=state)
    np.testing.assert_array_equal(state, before)
    donated = jax.jit(lambda s, x: tfla.jax.delta_rule_step(**x, state=s), donate_argnums=0)
    own = jnp.copy(state)  # numpy's memory, which JAX may have borrowed, cannot be donated
    address = own.unsafe_buffer_pointer()
    again, in_place = donated(own, given)
    np.testing.assert_array_equal(again, h)
    np.testing.assert_array_equal(in_place, after)
    assert in_place.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("inputs", [{}, EVERYTHING], ids=str)
def test_vmap_equals_a_loop(inputs):
    """Merged into the batch without A_log and dt_bias, which differ from call to call here; else one after another."""
    many = [make(seed=seed, **inputs) for seed in range(3)]
    state = make_state()

    def run(given):
        h, last = tfla.jax.delta_rule(**given, initial_state=state, output_final_state=True)
        return (h**2).sum() + (last**2).sum(), (h, last)

    grad = jax.grad(run, has_aux=True)
    stacked = {name: jnp.stack([given[name] for given in many]) for name in many[0]}
    results = jax.jit(jax.vmap(grad))(stacked)
    for number, given in enumerate(many):
        for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(grad(given)), strict=True):
            assert relative_error(x[number], y) < 1e-12


def test_vmap_with_a_shared_parameter():
    """Gradients per sample of what all samples share."""
    given = make(**EVERYTHING)
    shared = {name: given.pop(name) for name in ("A_log", "dt_bias")}

    def gradient(given):
        one = {name: x[None] for name, x in given.items()}
        return jax.grad(lambda shared: (tfla.jax.delta_rule(**one, **shared) ** 2).sum())(shared)

    found = jax.vmap(gradient)(given)
    for row in range(2):
        wanted = gradient({name: x[row] for name, x in given.items()})
        assert all(relative_error(found[name][row], x) < 1e-12 for name, x in wanted.items())


def test_vmap_over_packings_and_steps():
    given, packings = make(batch=1), jnp.asarray([[0, 5, 37], [0, 30, 37]])
    together = jax.vmap(lambda packing: tfla.jax.delta_rule(**given, cu_seqlens=packing))(packings)
    for number, packing in enumerate(packings):
        np.testing.assert_array_equal(together[number], tfla.jax.delta_rule(**given, cu_seqlens=packing))
    token, state = mapped(lambda x: x[:, :1], make(**EVERYTHING)), make_state()
    h, after = jax.vmap(lambda v: tfla.jax.delta_rule_step(**token | {"v": v}, state=state))(
        jnp.stack([token["v"], -token["v"]])
    )
    for number, sign in enumerate((1, -1)):
        h_one, after_one = tfla.jax.delta_rule_step(**token | {"v": sign * token["v"]}, state=state)
        np.testing.assert_array_equal(h[number], h_one)
        np.testing.assert_array_equal(after[number], after_one)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_over_batch_and_heads(check_vma):
    """Parameters of heads are whole along the batch: their gradients are summed over it."""
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    given = make(**EVERYTHING)
    tokens = {name: P("data", None, "heads") for name in PER_TOKEN}
    specs = (tokens | {"A_log": P("heads"), "dt_bias": P("heads")},)

    def run(given):
        return tfla.jax.delta_rule(**given)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=tokens["v"], check_vma=check_vma)
    np.testing.assert_allclose(sharded(given), run(given), rtol=1e-12, atol=1e-12)
    grads = jax.jit(jax.grad(lambda x: (sharded(x) ** 2).sum()))(given)
    for name, x in jax.grad(lambda x: (run(x) ** 2).sum())(given).items():
        assert relative_error(grads[name], x) < 1e-12, name


REFUSED = [
    ({"write": "relu"}, "write is 'relu'; it must be 'plain', 'sigmoid' or 'twice_sigmoid'"),
    ({"layout": "tbhd"}, "layout is 'tbhd'"),
    ({"chunk_size": 0}, "chunk_size is 0; it must be positive, or None"),
    ({"beta": jnp.zeros((2, 37, 5))}, "beta has shape"),
    ({"g": None, "A_log": jnp.zeros(4)}, "A_log is given without g"),
    ({"dt_bias": jnp.zeros(4)}, "dt_bias is given without A_log"),
    ({"A_log": jnp.zeros(3)}, "A_log has shape"),
    ({"k": jnp.zeros((2, 37, 2, 8), "float32")}, "k has dtype float32; it must be float64, the dtype of q"),
    ({"q": jnp.zeros((2, 37, 2, 8), "int8")}, "q has dtype int8"),
    ({"q": jnp.zeros((37, 8))}, "q has 2 axes"),
    ({"initial_state": make_state(3)}, "initial_state has shape"),
    ({"cu_seqlens": jnp.array([0, 37])}, "cu_seqlens is given with a batch of 2"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused_while_tracing(change, sentence):
    with pytest.raises(ValueError, match=f"^tfla: .*{sentence}"):
        jax.eval_shape(lambda: tfla.jax.delta_rule(**make() | change))


def test_refused_otherwise():
    given = make()
    with pytest.raises(ValueError, match="^tfla: state is missing"):
        tfla.jax.delta_rule_step(**given)
    with pytest.raises(ValueError, match="^tfla: state has 3 states"):
        tfla.jax.delta_rule_step(**given, state=make_state(3))
    with pytest.raises(RuntimeError, match=r"slots\[1\] is 7"):
        jax.block_until_ready(tfla.jax.delta_rule_step(**given, state=make_state(), slots=jnp.array([0, 7])))
    first = jax.grad(lambda q: (tfla.jax.delta_rule(**given | {"q": q}) ** 2).sum())
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: first(q).sum())(given["q"])


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_or_one_token(tokens):
    given, state = mapped(lambda x: x[:, :tokens], make()), make_state()
    h, last = tfla.jax.delta_rule(**given, initial_state=state, output_final_state=True)
    wanted, wanted_last = delta_recurrence(**{name: to_torch(x) for name, x in given.items()}, state=to_torch(state))
    assert h.shape == (2, tokens, 4, 12)
    assert relative_error(h, wanted) < 1e-10 and relative_error(last, wanted_last) < 1e-10
