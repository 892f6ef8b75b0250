"""tfla.mlstm and its formulations against the recurrence in float64: values, states, gradients."""

import inspect

import pytest
import torch

import tfla
from inputs import Inputs, make_inputs, make_state
from tfla.reference import BOUNDS, recurrence, relative_error

VARIANTS = [
    {},
    {"normalizer": "none"},
    {"gate": "sigmoid"},
    {"gate": "sigmoid", "normalizer": "max"},
    {"exact_normalizer_grad": True},
    {"qk_scale": 0.5, "eps": 1e-3, "soft_cap": 15.0},
]
FORMULATIONS = {"chunkwise": tfla.mlstm, "parallel": tfla.mlstm_parallel, "recurrent": tfla.mlstm_recurrent}


def head_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def check(function, given: Inputs, options: dict, *, state=None, reference=recurrence, layout="bthd", **extra) -> None:
    """Values, last state and all gradients of one call, with random gradients of h and of the last state."""
    dtype = given.q.dtype
    bound, grad_bound = BOUNDS[dtype]
    order = head_first if layout == "bhtd" else lambda x: x
    mine = given.leaves()
    wanted = given.map(lambda x: x.double()).leaves()
    my_state = None if state is None else [x.clone().requires_grad_(x.dim() > 2) for x in state]
    wanted_state = None if state is None else [x.double().requires_grad_(x.dim() > 2) for x in state]
    h, last = function(
        *mine.map(order), initial_state=my_state, output_final_state=True, layout=layout, **options, **extra
    )
    h = order(h)
    reference_h, reference_last = reference(*wanted, state=wanted_state, **options)
    dh = torch.randn_like(reference_h).to(dtype)
    dC, dn = (torch.randn_like(x) for x in last[:2])
    torch.autograd.backward([h, last.C, last.n], [dh, dC, dn])
    torch.autograd.backward([reference_h, *reference_last[:2]], [dh.double(), dC.double(), dn.double()])

    assert h.dtype == dtype and h.shape == reference_h.shape
    errors = {"h": relative_error(h, reference_h) / bound}
    state_bound = BOUNDS[torch.float64 if dtype == torch.float64 else torch.float32]  # the arithmetic's
    for name, x, y in zip(("C", "n", "m"), last, reference_last, strict=True):
        errors[f"last {name}"] = relative_error(x, y) / state_bound[0]
    for name, x, y in zip("qkvif", mine, wanted, strict=True):
        assert x.grad.dtype == x.dtype
        errors[f"d{name}"] = relative_error(x.grad, y.grad) / max(BOUNDS[x.dtype][1], state_bound[1])
    if state is not None:
        for name, x, y in zip("Cn", my_state, wanted_state, strict=False):
            errors[f"d{name}"] = relative_error(x.grad, y.grad) / max(grad_bound, state_bound[1])
    bad = {name: error for name, error in errors.items() if not error < 1}
    assert not bad, f"errors in units of their bounds: {bad}"


def test_options_at_their_defaults():
    """Tensors alone take a shorter way through the package, with the signature of the longer one."""
    parameters = inspect.signature(tfla.mlstm).parameters.values()
    defaults = {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}
    assert len(defaults) == 12 and defaults["eps"] == 1e-6
    given, other = make_inputs().leaves(), make_inputs().leaves()
    alone, named = tfla.mlstm(*given), tfla.mlstm(*other, **defaults)
    assert torch.equal(alone, named)
    for x in (alone, named):
        x.backward(torch.ones_like(x))
    for x, y in zip(given, other, strict=True):
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize(
    "option",
    [
        {"gate": "sigmoid"},
        {"normalizer": "none"},
        {"chunk_size": 16},
        {"qk_scale": 0.5},
        {"eps": 0.1},
        {"soft_cap": 1.0},
        {"layout": "bhtd"},
        {"exact_normalizer_grad": True},
    ],
    ids=str,
)
def test_an_option_alone(option):
    """Without a state to return there is a shorter way; no option gets lost on it."""
    given = make_inputs().map(head_first if "layout" in option else lambda x: x)
    short, long = given.leaves(), given.leaves()
    h, (other, _) = tfla.mlstm(*short, **option), tfla.mlstm(*long, output_final_state=True, **option)
    assert torch.equal(h, other)
    dh = torch.randn_like(h)
    h.backward(dh)
    other.backward(dh)
    for x, y in zip(short, long, strict=True):
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_variants(options, dtype):
    m = 0.0 if options.get("gate") == "sigmoid" else 0.3
    state = make_state(2, 2, 8, 12, torch.float64 if dtype == torch.float64 else torch.float32, m=m)
    check(tfla.mlstm, make_inputs(qk_heads=1, dtype=dtype), options, state=state)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize("options", [{}, {"gate": "sigmoid"}], ids=str)
def test_formulations_and_layouts(options, formulation, layout):
    check(FORMULATIONS[formulation], make_inputs(tokens=70), options, layout=layout)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (3, 2, 1, 5, 3), (1, 129, 3, 17, 9), (2, 200, 2, 16, 32)], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 1, 16, 1000])
def test_shapes_and_chunks(shape, chunk_size):
    check(tfla.mlstm, make_inputs(*shape), {}, chunk_size=chunk_size)


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_gates_in_a_dtype_of_their_own(gate_dtype):
    check(tfla.mlstm, make_inputs(dtype=torch.bfloat16, gate_dtype=gate_dtype), {})


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_packed_sequences(layout, index_dtype):
    bounds = [0, 5, 5, 29, 64]

    def packed(*inputs, state, **options):
        """The reference, sequence by sequence."""
        parts = []
        for s, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            begins_from = tuple(x[s : s + 1] for x in state)
            parts.append(recurrence(*(x[:, begin:end] for x in inputs), state=begins_from, **options))
        h, states = zip(*parts, strict=True)
        return torch.cat(h, dim=1), tuple(torch.cat(x) for x in zip(*states, strict=True))

    given = make_inputs(1, 64)
    cu_seqlens = torch.tensor(bounds, dtype=index_dtype)
    check(tfla.mlstm, given, {}, state=make_state(4, 2, 8, 12), reference=packed, layout=layout, cu_seqlens=cu_seqlens)


def test_slices_of_a_fused_projection():
    """q, k, v as views of one tensor; gradients come back into it."""
    fused = torch.randn(2, 20, 2, 8 + 8 + 12)
    i, f = torch.randn(2, 20, 2), torch.randn(2, 20, 2) + 3
    given, wanted = fused.clone().requires_grad_(), fused.double().requires_grad_()
    tfla.mlstm(*given.split([8, 8, 12], dim=-1), i, f).sum().backward()
    recurrence(*wanted.split([8, 8, 12], dim=-1), i, f)[0].sum().backward()
    assert relative_error(given.grad, wanted.grad) < 1e-4


def test_gradients_of_any_strides():
    """As sums, expansions and transpositions hand them back."""
    for dh in (
        torch.ones(()).expand(2, 37, 2, 12),
        torch.randn(12).expand(2, 37, 2, 12),
        torch.randn(2, 1, 2, 1).expand(2, 37, 2, 12),
        torch.randn(2, 37, 12, 2).transpose(2, 3),
    ):
        given, copied = make_inputs().leaves(), make_inputs().leaves()
        tfla.mlstm(*given).backward(dh)
        tfla.mlstm(*copied).backward(dh.contiguous())
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(given, copied, strict=True))


def test_no_tokens_leaves_the_state():
    state = make_state(2, 2, 8, 12)
    h, last = tfla.mlstm(*make_inputs(tokens=0), initial_state=state, output_final_state=True)
    assert h.shape == (2, 0, 2, 12)
    assert all(torch.equal(x, y) for x, y in zip(last, state, strict=True))


def test_only_the_state_is_used():
    given, wanted = make_inputs().leaves(), make_inputs().map(lambda x: x.double()).leaves()
    _, last = tfla.mlstm(*given, output_final_state=True)
    assert last.C.requires_grad and last.n.requires_grad and not last.m.requires_grad
    last.n.square().sum().backward()
    recurrence(*wanted)[1][1].square().sum().backward()
    for x, y in zip(given, wanted, strict=True):
        assert relative_error(x.grad, torch.zeros_like(x) if y.grad is None else y.grad) < 1e-4


def test_threads_do_not_change_a_bit():
    given = make_inputs(1, 500, 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = tfla.mlstm(*given)
        torch.set_num_threads(2)
        assert torch.equal(one, tfla.mlstm(*given))
    finally:
        torch.set_num_threads(threads)
