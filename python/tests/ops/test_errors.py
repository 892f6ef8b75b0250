"""What is refused, with the sentence that says so."""

import pytest
import torch

import tfla
from inputs import make_inputs, make_state
from tfla._torch import operators as library

GIVEN = make_inputs(2, 4, 2, 8, 12)
STATE = make_state(2, 2, 8, 12)


def replaced(**changes):
    return [changes.get(name, x) for name, x in zip("qkvif", GIVEN, strict=True)]


def leaves(**changes):
    return [changes.get(name, x) for name, x in zip("qkvif", GIVEN.leaves(), strict=True)]


REFUSED = {
    "no q": (lambda: tfla.mlstm(*replaced(q=None)), "q is missing"),
    "no k for a gradient": (lambda: tfla.mlstm(*leaves(k=None)), "k is missing"),
    "no q for a gradient": (lambda: tfla.mlstm(*leaves(q=None)), "q is missing"),
    "no v for a state": (lambda: tfla.mlstm(*leaves(v=None), output_final_state=True), "v is missing"),
    "no f in step": (lambda: tfla.mlstm_step(*replaced(f=None), STATE), "f is missing"),
    "no C in step": (lambda: tfla.mlstm_step(*GIVEN, (None, *STATE[1:])), "state.C is missing"),
    "rank of q": (lambda: tfla.mlstm(*replaced(q=GIVEN.q[0])), "q has 3 axes"),
    "rank of v": (lambda: tfla.mlstm(*replaced(v=GIVEN.v[0])), "v has 3 axes"),
    "five axes": (lambda: tfla.mlstm(*replaced(q=GIVEN.q[None])), "q has 5 axes"),
    "five axes of v": (lambda: tfla.mlstm(*replaced(v=GIVEN.v[None])), "v has 5 axes"),
    "k's shape": (lambda: tfla.mlstm(*replaced(k=GIVEN.k[..., :4])), "k has shape"),
    "heads": (lambda: tfla.mlstm(*replaced(v=torch.randn(2, 4, 3, 12))), "v has 3 heads and q has 2"),
    "strides": (lambda: tfla.mlstm(*replaced(q=torch.randn(2, 4, 2, 16)[..., ::2])), "q has"),
    "k's dtype": (lambda: tfla.mlstm(*replaced(k=GIVEN.k.double())), "k has dtype float64; it must be float32"),
    "integers": (lambda: tfla.mlstm(*replaced(q=GIVEN.q.int())), "q has dtype int32"),
    "booleans": (lambda: tfla.mlstm(*replaced(i=GIVEN.i.bool())), "i has a dtype other than"),
    "devices": (lambda: tfla.mlstm(*replaced(k=GIVEN.k.to("meta"))), "tensors are on cpu, meta"),
    "gate": (lambda: tfla.mlstm(*GIVEN, gate="sig"), "gate is 'sig'; it must be 'exp', 'sigmoid' or 'log'"),
    "unhashable gate": (lambda: tfla.mlstm(*GIVEN, gate=["exp"]), r"gate is \['exp'\]"),
    "gate of a step": (lambda: tfla.mlstm_step(*GIVEN, STATE, gate="sig"), "gate is 'sig'"),
    "normalizer": (lambda: tfla.mlstm(*GIVEN, normalizer="mean"), "normalizer is 'mean'"),
    "layout": (lambda: tfla.mlstm(*GIVEN, layout="tbhd"), "layout is 'tbhd'; it must be 'bthd' or 'bhtd'"),
    "chunk size": (lambda: tfla.mlstm(*GIVEN, chunk_size=0), "chunk_size is 0"),
    "eps": (lambda: tfla.mlstm(*GIVEN, eps=-1.0), "eps is -1"),
    "soft cap": (lambda: tfla.mlstm(*GIVEN, soft_cap=0.0), "soft_cap is 0"),
    "scale": (lambda: tfla.mlstm(*GIVEN, qk_scale=float("nan")), "qk_scale is nan"),
    "pair as state": (lambda: tfla.mlstm(*GIVEN, initial_state=STATE[:2]), "initial_state is not a triple"),
    "state without m": (lambda: tfla.mlstm(*GIVEN, initial_state=(*STATE[:2], None)), "initial_state.m is missing"),
    "state's dtype": (
        lambda: tfla.mlstm(*GIVEN, initial_state=[x.double() for x in STATE]),
        "initial_state.C has dtype float64; states are float32",
    ),
    "state's batch": (lambda: tfla.mlstm(*GIVEN, initial_state=[x[:1] for x in STATE]), "initial_state.C has shape"),
    "packed batch": (lambda: tfla.mlstm(*GIVEN, cu_seqlens=torch.tensor([0, 4])), "with a batch of 2"),
    "scalar cu_seqlens": (lambda: tfla.mlstm(*GIVEN, cu_seqlens=torch.tensor(4)), "cu_seqlens has 0 axes"),
    "empty cu_seqlens": (
        lambda: tfla.mlstm(*GIVEN.map(lambda x: x[:1]), cu_seqlens=torch.tensor([]).int(), output_final_state=True),
        "cu_seqlens is empty",
    ),
    "end of cu_seqlens": (
        lambda: tfla.mlstm(*GIVEN.map(lambda x: x[:1]), cu_seqlens=torch.tensor([0, 5])),
        "cu_seqlens ends with 5",
    ),
    "slot out of range": (lambda: tfla.mlstm_step(*GIVEN, STATE, slots=torch.tensor([0, 2])), r"slots\[1\] is 2"),
    "slot twice": (lambda: tfla.mlstm_step(*GIVEN, STATE, slots=torch.tensor([1, 1])), "slots holds 1 twice"),
    "states without slots": (lambda: tfla.mlstm_step(*GIVEN, [x[:1] for x in STATE]), "state.C has 1 states"),
    "ranks in step": (
        lambda: tfla.mlstm_step(*GIVEN.map(lambda x: x[:, 0]).map(lambda x: x[0] if x.dim() == 3 else x), STATE),
        "q has 2 axes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^tfla: .*{sentence}"):
        call()


@pytest.mark.parametrize("inputs", [replaced, leaves])
@pytest.mark.parametrize("name", "qkvif")
@pytest.mark.parametrize("options", [{}, {"gate": "sigmoid", "output_final_state": True}], ids=str)
def test_other_than_tensors_are_refused(inputs, name, options):
    """By PyTorch's dispatcher."""
    with pytest.raises(RuntimeError, match=f"argument '{name}' but instead found type 'list'"):
        tfla.mlstm(*inputs(**{name: [1.0]}), **options)


def test_registered_operator_refuses_unknown_numbers():
    for gate in (3, -1, 256):
        with pytest.raises(ValueError, match=r"tfla: options.gate is not one of"):
            library.forward(*GIVEN, None, None, None, None, gate)


def test_refused_under_compile():
    """The kernel's own sentence, from inside a compiled graph."""
    compiled = torch.compile(tfla.mlstm, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="tfla: k has shape"):
        compiled(*replaced(k=GIVEN.k[:, :, :, :4].contiguous()))


def test_nothing_is_ignored():
    with pytest.raises(TypeError, match=r"^mlstm\(\) got an unexpected keyword argument 'scale'"):
        tfla.mlstm(*GIVEN, scale=1.0)
