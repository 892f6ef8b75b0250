"""tfla.jax against the recurrence in float64 numpy: values, gradients, and every transformation."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tfla.jax
from numpy_reference import mlstm as reference
from numpy_reference import relative_error
from tfla import info

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 4)  # for shard_map

B, T, H, HQK, DQK, DHV = 2, 37, 4, 2, 8, 12
BOUNDS = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-4), "bfloat16": (2.5e-3, 2.5e-3), "float16": (4e-4, 4e-4)}
OPTIONS = [
    {},
    {"normalizer": "none"},
    {"gate": "sigmoid"},
    {"gate": "sigmoid", "normalizer": "max"},
    {"gate": "log"},
    {"exact_normalizer_grad": True},
    {"qk_scale": 0.5, "eps": 1e-3, "soft_cap": 15.0, "chunk_size": 16},
]


def make_inputs(dtype="float32", batch=B, gate="exp", seed=0):
    rng = np.random.default_rng(seed)
    bias = np.linspace(3.0, 6.0, H)
    arrays = [rng.standard_normal(s) for s in ((batch, T, HQK, DQK), (batch, T, HQK, DQK), (batch, T, H, DHV))]
    i, f = 2 * rng.standard_normal((batch, T, H)) - 2, rng.standard_normal((batch, T, H)) + bias
    if gate == "log":
        i, f = 0.5 * rng.standard_normal((batch, T, H)), -np.exp(-f)
    return [jnp.asarray(x, dtype) for x in (*arrays, i, f)]


def make_state(sequences=B, dtype="float32", seed=1):
    rng = np.random.default_rng(seed)
    shape = (sequences, H, DQK, DHV)
    return tuple(jnp.asarray(rng.standard_normal(shape[:axes]), dtype) for axes in (4, 3, 2))


def reference_options(options):
    return {"exact" if key == "exact_normalizer_grad" else key: x for key, x in options.items() if key != "chunk_size"}


def normals(shape, dtype, seed=2):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_values_and_gradients(dtype, options, with_state):
    arrays = make_inputs(dtype, gate=options.get("gate", "exp"))
    wide = "float64" if dtype == "float64" else "float32"
    state = make_state(dtype=wide) if with_state else None
    dh = normals(arrays[2].shape, dtype)
    dlast = (normals((B, H, DQK, DHV), wide, 3), normals((B, H, DQK), wide, 4))

    @jax.jit
    def run(arrays, state):
        def loss(arrays, state):
            if not with_state:
                h = tfla.jax.mlstm(*arrays, **options)
                return (h.astype(wide) * dh.astype(wide)).sum(), (h, ())
            h, last = tfla.jax.mlstm(*arrays, initial_state=state, output_final_state=True, **options)
            inner = (last.C * dlast[0]).sum() + (last.n * dlast[1]).sum()
            return (h.astype(wide) * dh.astype(wide)).sum() + inner, (h, last)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(arrays, state)

    (darrays, dstate), (h, last) = run(arrays, state)
    h_ref, last_ref, grads = reference(
        *arrays, state, dh=dh, dstate=dlast if with_state else None, **reference_options(options)
    )
    bound, grad_bound = BOUNDS[dtype]
    assert h.dtype == dtype
    assert relative_error(h, h_ref) < bound
    for name, x in zip("qkvif", darrays, strict=True):
        assert x.dtype == dtype
        assert relative_error(x, grads[name]) < grad_bound, name
    if with_state:
        # The states' own bounds: they are float32 for 16-bit tensors, but formed from 16-bit products on no path here.
        state_bound = BOUNDS[wide]
        for name, x, y in zip("Cnm", last, last_ref, strict=True):
            assert relative_error(x, y) < state_bound[0], name
        for name, x in zip("Cn", dstate[:2], strict=True):
            assert relative_error(x, grads[name]) < state_bound[1], name
        assert not dstate[2].any()


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_packed_sequences(index_dtype):
    arrays, bounds = make_inputs("float64", batch=1), [0, 5, 5, 20, T]
    state, dh = make_state(4, "float64"), normals((1, T, H, DHV), "float64")
    index = jnp.asarray(bounds, index_dtype)

    def loss(arrays, state, index):
        h, last = tfla.jax.mlstm(*arrays, initial_state=state, output_final_state=True, cu_seqlens=index)
        return (h * dh).sum(), (h, last)

    (darrays, dstate), (h, last) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(arrays, state, index)
    h_ref, last_ref, grads = reference(*arrays, state, dh=dh, cu_seqlens=bounds)
    assert relative_error(h, h_ref) < 1e-10
    for x, y in zip(last, last_ref, strict=True):
        assert relative_error(x, y) < 1e-10
    for name, x in zip("qkvifCn", [*darrays, *dstate[:2]], strict=True):
        assert relative_error(x, grads[name]) < 1e-10, name


def test_layout_bhtd_is_the_same_function():
    arrays = make_inputs("float64")
    swapped = [jnp.swapaxes(x, 1, 2) for x in arrays]
    run = jax.value_and_grad(lambda xs, layout: (tfla.jax.mlstm(*xs, layout=layout) ** 2).sum(), argnums=0)
    value, grads = run(arrays, "bthd")
    swapped_value, swapped_grads = run(swapped, "bhtd")
    assert abs(value - swapped_value) <= 1e-12 * abs(value)
    for x, y in zip(grads, swapped_grads, strict=True):
        np.testing.assert_array_equal(x, jnp.swapaxes(y, 1, 2))
    _, last = tfla.jax.mlstm(*arrays, output_final_state=True)
    _, swapped_last = tfla.jax.mlstm(*swapped, output_final_state=True, layout="bhtd")
    for x, y in zip(last, swapped_last, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("slots", [None, [4, 0]])
@pytest.mark.parametrize("options", [{}, {"gate": "sigmoid"}, {"gate": "log"}], ids=str)
def test_steps_equal_the_whole(options, slots):
    arrays = make_inputs("float64", gate=options.get("gate", "exp"))
    first = make_state(B, "float64")
    rows = np.arange(B) if slots is None else np.array(slots)
    pool = make_state(B if slots is None else 6, "float64", seed=9)
    pool = tuple(x.at[rows].set(y) for x, y in zip(pool, first, strict=True))
    untouched = np.setdiff1d(np.arange(len(pool[0])), rows)
    h_ref, last_ref, _ = reference(*arrays, first, **options)

    @jax.jit
    def decode(state, *tokens):
        return tfla.jax.mlstm_step(*tokens, state, slots=None if slots is None else jnp.asarray(slots), **options)

    state, h = pool, []
    for start in (0, 1, 2, 10):  # one token, one token, eight, the rest
        end = {0: 1, 1: 2, 2: 10, 10: T}[start]
        out, state = decode(state, *(x[:, start:end] for x in arrays))
        h.append(out)
    assert relative_error(jnp.concatenate(h, 1), h_ref) < 1e-10
    for name, x, y, before in zip("Cnm", state, last_ref, pool, strict=True):
        assert relative_error(x[rows], y) < 1e-10, name
        np.testing.assert_array_equal(x[untouched], before[untouched])


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_step_of_one_token_without_its_axis(layout):
    arrays, state = make_inputs("float64"), make_state(dtype="float64")
    expected, after = tfla.jax.mlstm_step(*(x[:, :1] for x in arrays), state)
    h, last = tfla.jax.mlstm_step(*(x[:, 0] for x in arrays), state, layout=layout)
    np.testing.assert_array_equal(h, expected[:, 0])
    np.testing.assert_array_equal(last.C, after.C)


def test_step_leaves_its_argument_alone_and_uses_a_donated_one():
    arrays = [x[:, :1] for x in make_inputs("float64")]
    state = make_state(dtype="float64")
    before = [np.array(x) for x in state]
    h, after = tfla.jax.mlstm_step(*arrays, state)
    for x, y in zip(state, before, strict=True):
        np.testing.assert_array_equal(x, y)
    donated = jax.jit(lambda s, *xs: tfla.jax.mlstm_step(*xs, s), donate_argnums=0)
    own = jax.tree.map(jnp.copy, state)  # numpy's memory, which JAX may have borrowed, cannot be donated
    address = own[0].unsafe_buffer_pointer()
    again, in_place = donated(own, *arrays)
    np.testing.assert_array_equal(again, h)
    np.testing.assert_array_equal(in_place.C, after.C)
    assert in_place.C.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("nested", [False, True])
def test_vmap(nested):
    many = [make_inputs("float64", seed=s) for s in range(4)]
    state = make_state(dtype="float64")

    def run(arrays):
        h, last = tfla.jax.mlstm(*arrays, initial_state=state, output_final_state=True)
        return (h**2).sum() + (last.C**2).sum(), (h, last)

    grad = jax.grad(run, has_aux=True)
    stacked = [jnp.stack(xs) for xs in zip(*many, strict=True)]
    if nested:
        stacked = [x.reshape(2, 2, *x.shape[1:]) for x in stacked]
        results = jax.jit(jax.vmap(jax.vmap(grad, in_axes=0), in_axes=0))(stacked)
        results = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), results)
    else:
        results = jax.vmap(grad)(stacked)
    for number, arrays in enumerate(many):
        expected = grad(arrays)
        for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            assert relative_error(x[number], y) < 1e-12


def test_vmap_over_some_arguments_and_packings():
    arrays = make_inputs("float64", batch=1)
    packings = jnp.asarray([[0, 5, T], [0, 30, T]])
    many_v = jnp.stack([arrays[2], 2 * arrays[2]])

    def run(v, packing):
        return tfla.jax.mlstm(*arrays[:2], v, *arrays[3:], cu_seqlens=packing)

    together = jax.vmap(run)(many_v, packings)
    for number in range(2):
        np.testing.assert_array_equal(together[number], run(many_v[number], packings[number]))


def test_vmap_of_a_step():
    arrays, state = [x[:, :1] for x in make_inputs("float64")], make_state(dtype="float64")
    stacked = [jnp.stack([x, -x]) for x in arrays]
    h, after = jax.vmap(lambda *xs: tfla.jax.mlstm_step(*xs, state))(*stacked)
    for number, sign in enumerate((1, -1)):
        h_one, after_one = tfla.jax.mlstm_step(*(sign * x for x in arrays), state)
        np.testing.assert_array_equal(h[number], h_one)
        np.testing.assert_array_equal(after.C[number], after_one.C)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_over_batch_and_heads(check_vma):
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    arrays, state = make_inputs("float64"), make_state(dtype="float64")
    tokens, gates = P("data", None, "heads", None), P("data", None, "heads")
    specs = ([tokens, tokens, tokens, gates, gates], (P("data", "heads"), P("data", "heads"), P("data", "heads")))

    def run(arrays, state):
        return tfla.jax.mlstm(*arrays, initial_state=state, output_final_state=True)

    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=(tokens, tfla.jax.State(*specs[1])), check_vma=check_vma
    )

    def loss(function, arrays, state):
        h, last = function(arrays, state)
        return (h**2).sum() + (last.C**2).sum()

    value, grads = jax.jit(jax.value_and_grad(lambda *a: loss(sharded, *a), argnums=(0, 1)))(arrays, state)
    expected, expected_grads = jax.value_and_grad(lambda *a: loss(run, *a), argnums=(0, 1))(arrays, state)
    assert abs(value - expected) < 1e-12 * abs(expected)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert relative_error(x, y) < 1e-12
    h_ref, *_ = reference(*arrays, state)
    assert relative_error(sharded(arrays, state)[0], h_ref) < 1e-10


def test_shard_map_with_a_replicated_argument():
    """A parameter that every device holds whole: its gradient is summed over the devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    arrays = make_inputs("float64")
    shared = arrays[3][:1]

    def run(shared, *rest):
        q, k, v, f = rest
        return tfla.jax.mlstm(q, k, v, jnp.broadcast_to(shared, f.shape), f)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P(), *(P("data"),) * 4), out_specs=P("data"))
    rest = [*arrays[:3], arrays[4]]
    grad = jax.grad(lambda s: (sharded(s, *rest) ** 2).sum())(shared)
    expected = jax.grad(lambda s: (run(s, *rest) ** 2).sum())(shared)
    assert relative_error(grad, expected) < 1e-12


def test_remat_and_scan():
    arrays = make_inputs("float64")

    def layer(carry, scale):
        return tfla.jax.mlstm(*arrays[:2], carry * scale, *arrays[3:]), None

    def loss(body, v):
        return (jax.lax.scan(body, v, jnp.array([1.0, 0.5, 2.0]))[0] ** 2).sum()

    plain = jax.grad(lambda v: loss(layer, v))(arrays[2])
    rematerialised = jax.jit(jax.grad(lambda v: loss(jax.checkpoint(layer), v)))(arrays[2])
    assert relative_error(rematerialised, plain) < 1e-12


def with_keep(keep, **options):
    def gradients(arrays):
        def loss(arrays):
            h, last = tfla.jax.mlstm(*arrays, output_final_state=True, keep=keep, **options)
            return (h**2).sum() + (last.C**2).sum()

        return jax.grad(loss)(arrays)

    return gradients


def same_bits(one, other):
    return all((x == y).all() for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_what_is_kept_changes_nothing_on_a_cpu():
    arrays = make_inputs()
    found = [jax.jit(with_keep(keep))(arrays) for keep in ("denominators", "states")]
    assert same_bits(*found)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_memory_for_what_is_kept_goes_from_forward_to_backward(monkeypatch, layout):
    """As where the default platform is a GPU, whose plan says how much; the CPU leaves it as it is."""
    arrays = make_inputs()
    arrays = [jnp.swapaxes(x, 1, 2) for x in arrays] if layout == "bhtd" else arrays
    wanted = with_keep("states", layout=layout)(arrays)
    asked, plan = [], info.saved

    def saved(**call):
        asked.append(call)
        return plan(**call, gpu="H200")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(info, "saved", saved)
    graph = str(jax.make_jaxpr(with_keep("states", layout=layout))(arrays))
    shape = {"batch": B, "tokens": T, "heads": H, "dqk": DQK, "dhv": DHV, "dtype": "float32", "sequences": None}
    assert asked == [{**shape, "keep": "states", "chunk_size": 0}]
    size = plan(**asked[0], gpu="H200").bytes // 4
    made = re.findall(rf"(\w+):i32\[{size}\]", graph)
    handed = re.findall(r"tfla_mlstm_backward.*?\] ([\w ]*)", graph, re.DOTALL)
    assert size > B * H * DQK * DHV and len(made) == 1 and handed[0].split()[-1] == made[0]
    assert same_bits(jax.jit(with_keep("states", layout=layout))(arrays), wanted)
    stacked = [jnp.stack([x, 2 * x, x]) for x in arrays]
    many = jax.vmap(with_keep("states", layout=layout))(stacked)
    assert same_bits([x[2] for x in many], wanted)


def test_memory_for_what_is_kept_of_packed_sequences(monkeypatch):
    """Under vmap each packing is a call, with a part of that memory."""
    arrays, plan = make_inputs(batch=1), info.saved
    packings = jnp.array([[0, 9, T], [0, 30, T]])
    wanted = [with_keep("states", cu_seqlens=packing)(arrays) for packing in packings]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(info, "saved", lambda **call: plan(**call, gpu="H200"))
    found = jax.vmap(lambda packing: with_keep("states", cu_seqlens=packing)(arrays))(packings)
    for number, grads in enumerate(wanted):
        assert same_bits([x[number] for x in found], grads)


REFUSED = [
    ({"gate": "relu"}, "gate is 'relu'; it must be 'exp', 'sigmoid' or 'log'"),
    ({"layout": "tbhd"}, "layout is 'tbhd'"),
    ({"normalizer": "l2"}, "normalizer is 'l2'"),
    ({"eps": -1.0}, "eps"),
    ({"keep": "nothing"}, "keep is 'nothing'; it must be 'denominators' or 'states'"),
    ({"chunk_size": 0}, "chunk_size is 0; it must be positive, or None"),
    ({"i": jnp.zeros((B, T, H + 1))}, r"i has shape \(2,37,5\); it must be \(B,T,H\) = \(2,37,4\)"),
    ({"k": jnp.zeros((B, T, HQK, DQK), "float64")}, "k has dtype float64; it must be float32, the dtype of q"),
    ({"q": jnp.zeros((B, T, HQK, DQK), "int8")}, "q has dtype int8"),
    ({"q": jnp.zeros((T, DQK))}, "q has 2 axes"),
    ({"q": jnp.zeros((1, B, T, HQK, DQK))}, "q has 5 axes"),
    ({"initial_state": make_state(B + 1)}, "initial_state.C has shape"),
    ({"initial_state": make_state()[:2]}, "state has 2 parts"),
    ({"cu_seqlens": jnp.array([0, T])}, "cu_seqlens is given with a batch of 2"),
    ({"cu_seqlens": jnp.array([0.0, 1.0])}, "cu_seqlens has dtype"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused_while_tracing(change, sentence):
    tensors = dict(zip("qkvif", make_inputs(), strict=True))
    options = {key: x for key, x in change.items() if key not in tensors}
    tensors |= {key: x for key, x in change.items() if key in tensors}
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(lambda *xs: tfla.jax.mlstm(*xs, **options), *tensors.values())


def test_values_are_refused_when_the_call_runs():
    arrays = make_inputs(batch=1)
    with pytest.raises(RuntimeError, match=r"cu_seqlens falls from 5 to 3 at index 2; it must not decrease"):
        jax.block_until_ready(tfla.jax.mlstm(*arrays, cu_seqlens=jnp.array([0, 5, 3, T])))
    with pytest.raises(RuntimeError, match=r"slots\[1\] is 7; it must be at least 0 and below 2"):
        arrays = [x[:, :1] for x in make_inputs()]
        jax.block_until_ready(tfla.jax.mlstm_step(*arrays, make_state(), slots=jnp.array([0, 7])))


def test_second_derivatives_are_refused():
    arrays = make_inputs("float64")
    first = jax.grad(lambda q: (tfla.jax.mlstm(q, *arrays[1:]) ** 2).sum())
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: first(q).sum())(arrays[0])


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_or_one_token(tokens):
    arrays, state = [x[:, :tokens] for x in make_inputs("float64")], make_state(dtype="float64")
    h, last = tfla.jax.mlstm(*arrays, initial_state=state, output_final_state=True)
    h_ref, last_ref, _ = reference(*arrays, state)
    assert h.shape == (B, tokens, H, DHV)
    assert relative_error(h, h_ref) < 1e-10
    for x, y in zip(last, last_ref, strict=True):
        assert relative_error(x, y) < 1e-10


def test_without_jax():
    code = "import sys; sys.modules['jax'] = None; import tfla; tfla.jax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "tfla: tfla.jax needs jax, which is not installed" in result.stderr


def test_needs_no_torch():
    code = "import sys, tfla.jax; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "False", result.stderr
