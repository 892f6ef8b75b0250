"""The table of options: what else states a default, a name, a number or an order agrees with it."""

import inspect
import re
from typing import get_args, get_type_hints

import pytest
import torch

import tfla
from repository import ROOT
from tfla import _options, conv, delta, ops
from tfla._options import DEFAULTS, DELTA, DELTA_OPTIONS, GATE_FAMILIES, MLSTM, OPTIONS
from tfla.distributed import mlstm as distributed_mlstm
from tfla.nn import MLSTMCell, MLSTMLayer

TYPES = {"int": "int", "bool": "bool", "float": "float", "float?": "Optional[float]"}


def defaults(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}


def of_steps(options):
    return tuple(option for option in options if option.of_steps)


# Operators, how many tensors each takes, and the options after them.
SCHEMAS = [
    ("mlstm", 9, MLSTM, OPTIONS),
    ("mlstm_with_saved", 9, MLSTM, OPTIONS),
    ("mlstm_with_state", 9, MLSTM, OPTIONS),
    ("mlstm_with_state_and_saved", 9, MLSTM, OPTIONS),
    ("mlstm_backward", 13, MLSTM, OPTIONS),
    ("mlstm_step", 9, MLSTM, of_steps(OPTIONS)),
    ("_mlstm", 5, MLSTM, ()),
    ("_mlstm_with_saved", 5, MLSTM, ()),
    ("_mlstm_backward", 7, MLSTM, ()),
    ("_mlstm_step", 8, MLSTM, ()),
    ("delta_rule", 9, DELTA, DELTA_OPTIONS),
    ("delta_rule_with_state", 9, DELTA, DELTA_OPTIONS),
    ("delta_rule_backward", 11, DELTA, DELTA_OPTIONS),
    ("delta_rule_step", 9, DELTA, of_steps(DELTA_OPTIONS)),
]
CONVOLUTION = ("causal_conv1d", "causal_conv1d_with_state", "causal_conv1d_backward", "causal_conv1d_step")
# Arguments of forward alone that follow the options of the state space dual, which have the defaults of SsdOptions.
STATE_SPACE = {"ssd": 2, "ssd_backward": 0, "ssd_step": 0}


@pytest.mark.parametrize(("operator", "tensors", "table", "options"), SCHEMAS, ids=[row[0] for row in SCHEMAS])
def test_schemas(operator, tensors, table, options):
    """Their defaults are those of the structs of options in include/tfla; that of keep is bindings/torch.cc's."""
    arguments = getattr(torch.ops.tfla, operator).default._schema.arguments
    assert all(str(x.type) in ("Tensor", "Optional[Tensor]") for x in arguments[:tensors])
    wanted = table.encode_all(tuple(option.default for option in options))
    found = [(x.name, str(x.type), x.has_default_value(), x.default_value) for x in arguments[tensors:]]
    assert found == [
        (option.argument, TYPES[option.type], True, default) for option, default in zip(options, wanted, strict=True)
    ]


def test_no_operator_is_left_out():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tfla::")}
    assert names == {f"tfla::{name}" for name in (*(row[0] for row in SCHEMAS), *CONVOLUTION, *STATE_SPACE)}


@pytest.mark.parametrize(("operator", "behind"), STATE_SPACE.items())
def test_state_space_schemas(operator, behind):
    """Its options, and those of the function: no upper limit is None there and infinity here."""
    arguments = getattr(torch.ops.tfla, operator).default._schema.arguments
    wanted = [("dt_softplus", "bool", False), ("dt_min", "float", 0.0), ("dt_max", "Optional[float]", None)]
    wanted += [] if operator == "ssd_step" else [("chunk_size", "int", 0)]
    found = [(x.name, str(x.type), x.default_value) for x in arguments]
    assert found[len(found) - behind - len(wanted) : len(found) - behind] == wanted
    function = defaults(tfla.ssd_step if operator == "ssd_step" else tfla.ssd)
    assert function["dt_softplus"] is False and function["dt_limit"] == (0.0, float("inf"))


@pytest.mark.parametrize("operator", CONVOLUTION)
def test_convolution_schemas(operator):
    """Its one option that is a number, by the order of the enumerators; none is the default."""
    option = getattr(torch.ops.tfla, operator).default._schema.arguments[-1]
    assert (option.name, str(option.type), option.default_value) == ("activation", "int", 0)
    header = (ROOT / "include/tfla/conv.h").read_text()
    names = re.search(r"enum class ConvActivation [^{]*{(.*?)}", header)[1].split(",")
    assert [name.strip() for name in names] == ["none", "silu"]
    assert conv._ACTIVATIONS == {None: 0, "silu": 1, "swish": 1}
    assert set(get_args(conv.Activation)) == {"silu", "swish"} and get_args(conv.ConvLayout) == ("btd", "bdt")


@pytest.mark.parametrize(
    ("header", "name", "number"),
    [
        (header, name, number)
        for header, options in (("mlstm.h", OPTIONS), ("delta.h", DELTA_OPTIONS))
        for option in options
        for name, number in (option.codes or {}).items()
    ],
)
def test_numbers_are_those_of_the_library(header, name, number):
    """By the order of the enumerators: include/tfla/mlstm.h calls some of them otherwise."""
    text = (ROOT / "include" / "tfla" / header).read_text()
    words = {"exp": "exponential", None: "automatic", "bthd": "false", "bhtd": "true"}
    lists = [re.split(r",\s*", x) for x in re.findall(r"enum class \w+ : std::uint8_t \{ (.*?) \};", text)]
    places = [x.index(words.get(name, name)) for x in [*lists, ["false", "true"]] if words.get(name, name) in x]
    assert number in places


PER_HEAD = {"A_log": None, "dt_bias": None}


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
        (tfla.delta_rule, (), PER_HEAD | {"initial_state": None, "output_final_state": False, "cu_seqlens": None}),
        (tfla.delta_rule_step, ("chunk_size",), PER_HEAD | {"slots": None}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_signatures(function, left_out, others):
    options = DELTA_OPTIONS if "delta" in function.__name__ else OPTIONS
    wanted = {option.name: option.default for option in options if option.is_keyword and option.name not in left_out}
    assert defaults(function) == wanted | others


def test_signatures_of_jax():
    jax = pytest.importorskip("tfla.jax")
    assert defaults(jax.mlstm) == defaults(tfla.mlstm)
    assert defaults(jax.mlstm_step) == defaults(tfla.mlstm_step)
    assert defaults(jax.delta_rule) == defaults(tfla.delta_rule)
    assert defaults(jax.delta_rule_step) == defaults(tfla.delta_rule_step)


@pytest.mark.parametrize("module", [MLSTMCell, MLSTMLayer])
def test_signatures_of_modules(module):
    """The soft cap is their own."""
    given = defaults(module)
    shared = {option.name for option in OPTIONS} & set(given) - {"soft_cap"}
    assert len(shared) == 6 and all(given[name] == getattr(DEFAULTS, name) for name in shared)


def test_types_of_options():
    """What type checkers are told is what the signature says."""
    of_mlstm = get_type_hints(ops._mlstm, vars(ops))
    of_delta = get_type_hints(tfla.delta_rule, vars(delta))
    for options, function, module, hints in (
        (ops._ChunkwiseOptions, tfla.mlstm, ops, of_mlstm),
        (ops._Options, tfla.mlstm_parallel, ops, of_mlstm),
        (delta._Options, tfla.delta_rule, delta, of_delta),
    ):
        typed = get_type_hints(options, vars(module))
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
    assert get_args(_options.Write) == tuple(DELTA.codes.write)


@pytest.mark.parametrize("family", GATE_FAMILIES.values(), ids=lambda family: family.name)
def test_families_in_the_operators(family):
    """The normalizer without being asked for one, and whether there is a max state."""
    torch.manual_seed(1)
    given = [torch.randn(1, 9, 2, 4) for _ in range(3)] + [-torch.rand(1, 9, 2) for _ in range(2)]
    h, state = tfla.mlstm(*given, gate=family.name, output_final_state=True)
    assert torch.equal(h, tfla.mlstm(*given, gate=family.name, normalizer=family.normalizer))
    assert bool(state.m.any()) == family.has_max_state


@pytest.mark.parametrize(("page", "table"), [("api.md", MLSTM), ("delta.md", DELTA)], ids=["mlstm", "delta"])
def test_pages(page, table):
    """Regenerate it with `python -m tfla._options`."""
    assert table.markdown() in (ROOT / "docs" / "python" / page).read_text()
