"""The table of options: what else states a default, a name, a number or an order agrees with it."""

import inspect
import re
from typing import get_args, get_type_hints

import pytest
import torch

import tfla
from repository import ROOT
from tfla import _options, ops
from tfla._options import DEFAULTS, GATE_FAMILIES, OPTIONS
from tfla.distributed import mlstm as distributed_mlstm
from tfla.nn import MLSTMCell, MLSTMLayer

TYPES = {"int": "int", "bool": "bool", "float": "float", "float?": "Optional[float]"}


def defaults(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("operator", "tensors", "options"),
    [
        ("mlstm", 9, OPTIONS),
        ("mlstm_with_saved", 9, OPTIONS),
        ("mlstm_with_state", 9, OPTIONS),
        ("mlstm_with_state_and_saved", 9, OPTIONS),
        ("mlstm_backward", 13, OPTIONS),
        ("mlstm_step", 9, tuple(option for option in OPTIONS if option.of_steps)),
        ("_mlstm", 5, ()),
        ("_mlstm_with_saved", 5, ()),
        ("_mlstm_backward", 7, ()),
        ("_mlstm_step", 8, ()),
    ],
)
def test_schemas(operator, tensors, options):
    """Their defaults are those of MlstmOptions in include/tfla/mlstm.h; that of keep is bindings/torch.cc's."""
    arguments = getattr(torch.ops.tfla, operator).default._schema.arguments
    assert all(str(x.type) in ("Tensor", "Optional[Tensor]") for x in arguments[:tensors])
    wanted = _options.encode_all(tuple(option.default for option in options))
    found = [(x.name, str(x.type), x.has_default_value(), x.default_value) for x in arguments[tensors:]]
    assert found == [
        (option.argument, TYPES[option.type], True, default) for option, default in zip(options, wanted, strict=True)
    ]


def test_no_operator_is_left_out():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tfla::")}
    assert len(names) == 10


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for option in OPTIONS for name, number in (option.codes or {}).items()]
)
def test_numbers_are_those_of_the_library(name, number):
    """By the order of the enumerators: include/tfla/mlstm.h calls some of them otherwise."""
    text = (ROOT / "include" / "tfla" / "mlstm.h").read_text()
    words = {"exp": "exponential", None: "automatic", "bthd": "false", "bhtd": "true"}
    lists = [re.split(r",\s*", x) for x in re.findall(r"enum class \w+ : std::uint8_t \{ (.*?) \};", text)]
    places = [x.index(words.get(name, name)) for x in [*lists, ["false", "true"]] if words.get(name, name) in x]
    assert number in places


@pytest.mark.parametrize(
    ("function", "left_out", "others"),
    [
        (tfla.mlstm, (), {"initial_state": None, "output_final_state": False, "cu_seqlens": None}),
        (
            tfla.mlstm_parallel,
            ("chunk_size", "keep"),
            {"initial_state": None, "output_final_state": False, "cu_seqlens": None},
        ),
        (
            tfla.mlstm_recurrent,
            ("chunk_size", "keep"),
            {"initial_state": None, "output_final_state": False, "cu_seqlens": None},
        ),
        (tfla.mlstm_step, ("exact_normalizer_grad", "chunk_size", "keep"), {"slots": None}),
        (distributed_mlstm, (), {"group": None, "initial_state": None, "output_final_state": False}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_signatures(function, left_out, others):
    wanted = {option.name: option.default for option in OPTIONS if option.is_keyword and option.name not in left_out}
    assert defaults(function) == wanted | others


def test_signatures_of_jax():
    jax = pytest.importorskip("tfla.jax")
    assert defaults(jax.mlstm) == defaults(tfla.mlstm)
    assert defaults(jax.mlstm_step) == defaults(tfla.mlstm_step)


@pytest.mark.parametrize("module", [MLSTMCell, MLSTMLayer])
def test_signatures_of_modules(module):
    """The soft cap is their own."""
    given = defaults(module)
    shared = {option.name for option in OPTIONS} & set(given) - {"soft_cap"}
    assert len(shared) == 6 and all(given[name] == getattr(DEFAULTS, name) for name in shared)


def test_types_of_options():
    """What type checkers are told is what the signature says."""
    hints = get_type_hints(ops._mlstm, vars(ops))
    for options, function in ((ops._ChunkwiseOptions, tfla.mlstm), (ops._Options, tfla.mlstm_parallel)):
        typed = get_type_hints(options, vars(ops))
        assert set(typed) == set(defaults(function)) - {"output_final_state"}
        assert typed == {name: hints[name] for name in typed}


@pytest.mark.parametrize("function", [tfla.mlstm_parallel, tfla.mlstm_recurrent])
@pytest.mark.parametrize("option", ["chunk_size", "keep", "scale", "formulation"])
def test_unknown_keywords(function, option):
    given = [torch.zeros(1, 1, 1, 1)] * 3 + [torch.zeros(1, 1, 1)] * 2
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument '{option}'$"):
        function(*given, **{option: 1})


def test_families():
    assert get_args(_options.Gate) == tuple(GATE_FAMILIES)
    for name, family in GATE_FAMILIES.items():
        assert (name, family.code) in dict(OPTIONS[0].codes).items()
        assert family.normalizer in get_args(_options.Normalizer)
    assert set(get_args(_options.Normalizer)) | {None} == set(OPTIONS[1].codes)
    assert get_args(_options.Layout) == tuple(OPTIONS[2].codes)
    assert get_args(_options.Keep) == tuple(_options.CODES.keep)


@pytest.mark.parametrize("family", GATE_FAMILIES.values(), ids=lambda family: family.name)
def test_families_in_the_operators(family):
    """The normalizer without being asked for one, and whether there is a max state."""
    torch.manual_seed(1)
    given = [torch.randn(1, 9, 2, 4) for _ in range(3)] + [-torch.rand(1, 9, 2) for _ in range(2)]
    h, state = tfla.mlstm(*given, gate=family.name, output_final_state=True)
    assert torch.equal(h, tfla.mlstm(*given, gate=family.name, normalizer=family.normalizer))
    assert bool(state.m.any()) == family.has_max_state


def test_page():
    """Regenerate it with `python -m tfla._options`."""
    assert _options.MLSTM.markdown() in (ROOT / "docs" / "python" / "api.md").read_text()
