"""The options of the operators, a row each, and the families of gates. Needs neither torch nor jax.

From these rows come the defaults in every signature of the package, what an option may be, the numbers that the C++
library knows it by, and the table of docs/python/api.md (`python -m tfla._options` prints it). The schemas of
bindings/torch.cc come from include/tfla/mlstm.h; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

Gate = Literal["exp", "sigmoid", "log"]
Normalizer = Literal["max", "none"]
Layout = Literal["bthd", "bhtd"]
Keep = Literal["denominators", "states"]


@dataclass(frozen=True)
class GateFamily:
    """How the raw gates i and f are read, after the soft cap. `tfla._gates` has the functions that are named here."""

    name: Gate
    code: int  # InputGate of include/tfla/mlstm.h
    log_input: Literal["itself", "log_sigmoid"]
    log_forget: Literal["itself", "log_sigmoid"]
    has_max_state: bool  # without one, m is 0
    normalizer: Normalizer  # where none is asked for


GATE_FAMILIES: Mapping[str, GateFamily] = {
    family.name: family
    for family in (
        GateFamily("exp", 0, "itself", "log_sigmoid", has_max_state=True, normalizer="max"),
        GateFamily("sigmoid", 1, "log_sigmoid", "log_sigmoid", has_max_state=False, normalizer="none"),
        GateFamily("log", 2, "itself", "itself", has_max_state=False, normalizer="none"),
    )
}


def unknown(name: str, value: object, accepted: tuple[object, ...]) -> ValueError:
    """The error for an option that is not among its accepted values."""
    words = [repr(word) for word in accepted]
    return ValueError(f"tfla: {name} is {value!r}; it must be {', '.join(words[:-1])} or {words[-1]}")


def _spacing(chunk_size: int | None) -> int:
    """The chunk size as the library takes it: 0 lets the plan choose."""
    if chunk_size is not None and chunk_size <= 0:
        raise ValueError(f"tfla: chunk_size is {chunk_size}; it must be positive, or None to let the plan choose")
    return chunk_size or 0


@dataclass(frozen=True)
class Option:
    name: str  # as functions spell it
    argument: str  # as the registered operators do
    type: Literal["int", "bool", "float", "float?"]  # of that argument, in words of a schema
    default: Any
    doc: str
    codes: Mapping[Any, int] | None = None  # of what is accepted, where that is not any value of the type
    of_steps: bool = True  # whether mlstm_step takes it
    is_keyword: bool = True  # else the name of the function says it


# In the order of the operators' arguments, where those of steps come first.
OPTIONS: tuple[Option, ...] = (
    Option(
        "gate", "gate", "int", "exp",
        "how i and f are read: input gate exp(i) or sigmoid(i), with the forget gate sigmoid(f); "
        "or both as logarithms of gates",
        codes={family.name: family.code for family in GATE_FAMILIES.values()},
    ),
    Option(
        "normalizer", "normalizer", "int", None,
        "the denominator: max(&#124;q.n&#124;, exp(-m)) + eps, or 1; None is the paper's choice for the gate",
        codes={None: 0, "none": 1, "max": 2},
    ),
    Option(
        "layout", "head_first", "bool", "bthd",
        "order of axes: (B,T,H,D) and gates (B,T,H), or (B,H,T,D) and gates (B,H,T)",
        codes={"bthd": False, "bhtd": True},
    ),
    Option("eps", "eps", "float", 1e-6, "added to the denominator after the max"),
    Option("qk_scale", "qk_scale", "float?", None, "factor on q; None is dqk ** -0.5"),
    Option("soft_cap", "soft_cap", "float?", None, "gates become cap * tanh(x / cap) first; None is no cap"),
    Option(
        "exact_normalizer_grad", "exact_normalizer_grad", "bool", False,
        "differentiate through the denominator too, which the paper holds constant", of_steps=False,
    ),
    Option(
        "chunk_size", "chunk_size", "int", None,
        "spacing of the states that backward stores; None lets the plan choose", of_steps=False,
    ),
    Option(
        "keep", "keep", "int", "denominators",
        "what forward leaves for backward on a GPU: denominators alone, or states too, "
        "which backward then does not make again",
        codes={"denominators": 1, "states": 2}, of_steps=False,
    ),
    Option(
        "formulation", "formulation", "int", "chunkwise",
        "which of three ways to compute the same function", codes={"chunkwise": 0, "parallel": 1, "recurrent": 2},
        of_steps=False, is_keyword=False,
    ),
)  # fmt: skip

DEFAULTS: Any = SimpleNamespace(**{option.name: option.default for option in OPTIONS})
CODES: Any = SimpleNamespace(**{option.name: option.codes for option in OPTIONS if option.codes is not None})
# Plain data, since torch.compile guards a graph by every attribute that was read on the way.
_CODES_IN_ORDER = tuple(option.codes for option in OPTIONS)
_CHUNK_SIZE = [option.name for option in OPTIONS].index("chunk_size")


def _refusal(given: tuple) -> ValueError:
    rows = zip(OPTIONS, given, strict=False)
    return next(unknown(row.name, x, tuple(row.codes)) for row, x in rows if row.codes and x not in tuple(row.codes))


def encode_all(given: tuple) -> tuple:
    """The first few options, or all of them, as operators take them; ValueError where one is not as described."""
    try:
        codes = [x if words is None else words[x] for words, x in zip(_CODES_IN_ORDER, given, strict=False)]
    except (KeyError, TypeError):  # of which the second means a value that has no hash
        raise _refusal(given) from None
    if len(codes) > _CHUNK_SIZE:
        codes[_CHUNK_SIZE] = _spacing(codes[_CHUNK_SIZE])
    return tuple(codes)


_DEFAULT_CODES = encode_all(tuple(option.default for option in OPTIONS))


def encode(given: tuple) -> tuple:
    """The same without those at the end that are at their defaults."""
    codes = encode_all(given)
    count = len(codes)
    while count > 0 and codes[count - 1] == _DEFAULT_CODES[count - 1]:
        count -= 1
    return codes[:count]


def _literal(value: Any) -> str:
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def table() -> str:
    """The options in Markdown, for docs/python/api.md."""
    kinds = {"int": "a positive integer, None", "bool": "True, False", "float": "a number", "float?": "a number, None"}
    lines = ["| option | values | default | what |", "|---|---|---|---|"]
    for option in OPTIONS:
        if not option.is_keyword:
            continue
        values = kinds[option.type] if option.codes is None else ", ".join(map(_literal, option.codes))
        steps = "" if option.of_steps else " (not of steps)"
        lines.append(f"| `{option.name}` | {values} | {_literal(option.default)} | {option.doc}{steps} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
