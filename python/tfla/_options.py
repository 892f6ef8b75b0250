"""The options of the operators, a row each, and the families of gates. Needs neither torch nor jax.

From these rows come the defaults in every signature of the package, what an option may be, the numbers that the C++
library knows it by, and the tables of docs/python (`python -m tfla._options` prints them). The schemas of
bindings/torch*.cc come from include/tfla/mlstm.h and delta.h; a test compares the two.
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
Write = Literal["plain", "sigmoid", "twice_sigmoid"]


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


def spacing(chunk_size: int | None) -> int:
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
    of_steps: bool = True  # whether the step takes it
    is_keyword: bool = True  # else the name of the function says it


# Rows of both operators.
_LAYOUT = Option(
    "layout", "head_first", "bool", "bthd",
    "order of axes: (B,T,H,D) and gates (B,T,H), or (B,H,T,D) and gates (B,H,T)",
    codes={"bthd": False, "bhtd": True},
)  # fmt: skip
_QK_SCALE = Option("qk_scale", "qk_scale", "float?", None, "factor on q; None is dqk ** -0.5")
_CHUNK_SIZE = Option(
    "chunk_size", "chunk_size", "int", None,
    "spacing of the states that backward stores; None lets the plan choose", of_steps=False,
)  # fmt: skip

# Of the mLSTM, in the order of the operators' arguments, where those of steps come first.
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
    _LAYOUT,
    Option("eps", "eps", "float", 1e-6, "added to the denominator after the max"),
    _QK_SCALE,
    Option("soft_cap", "soft_cap", "float?", None, "gates become cap * tanh(x / cap) first; None is no cap"),
    Option(
        "exact_normalizer_grad", "exact_normalizer_grad", "bool", False,
        "differentiate through the denominator too, which the paper holds constant", of_steps=False,
    ),
    _CHUNK_SIZE,
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

# Of the delta rule, in the same order.
DELTA_OPTIONS: tuple[Option, ...] = (
    Option(
        "write", "write", "int", "plain", "how beta is read: as it is, sigmoid(beta), or 2 sigmoid(beta)",
        codes={"plain": 0, "sigmoid": 1, "twice_sigmoid": 2},
    ),
    Option(
        "normalize_qk", "normalize_qk", "bool", False,
        "q and k become x / sqrt(&#124;x&#124;^2 + 1e-6) first, with gradients through it",
    ),
    _LAYOUT,
    _QK_SCALE,
    _CHUNK_SIZE,
)  # fmt: skip


class Table:
    """The options of an operator: their defaults, and how the values of a call become the numbers of its arguments."""

    def __init__(self, rows: tuple[Option, ...]) -> None:
        self.rows = rows
        self.defaults: Any = SimpleNamespace(**{row.name: row.default for row in rows})
        self.codes: Any = SimpleNamespace(**{row.name: row.codes for row in rows if row.codes is not None})
        # Plain data, since torch.compile guards a graph by every attribute that was read on the way.
        self._codes_in_order = tuple(row.codes for row in rows)
        self._chunk_size = rows.index(_CHUNK_SIZE)
        self._default_codes = self.encode_all(tuple(row.default for row in rows))

    def _refusal(self, given: tuple) -> ValueError:
        rows = [(row.name, x, tuple(row.codes)) for row, x in zip(self.rows, given, strict=False) if row.codes]
        return next(unknown(name, x, accepted) for name, x, accepted in rows if x not in accepted)

    def encode_all(self, given: tuple) -> tuple:
        """The first few options, or all of them, as operators take them; ValueError where one is not as described."""
        try:
            codes = [x if words is None else words[x] for words, x in zip(self._codes_in_order, given, strict=False)]
        except (KeyError, TypeError):  # of which the second means a value that has no hash
            raise self._refusal(given) from None
        if len(codes) > self._chunk_size:
            codes[self._chunk_size] = spacing(codes[self._chunk_size])
        return tuple(codes)

    def encode(self, given: tuple) -> tuple:
        """The same without those at the end that are at their defaults."""
        codes = self.encode_all(given)
        count = len(codes)
        while count > 0 and codes[count - 1] == self._default_codes[count - 1]:
            count -= 1
        return codes[:count]

    def markdown(self) -> str:
        kinds = {
            "int": "a positive integer, None", "bool": "True, False", "float": "a number", "float?": "a number, None"
        }  # fmt: skip
        lines = ["| option | values | default | what |", "|---|---|---|---|"]
        for row in self.rows:
            if not row.is_keyword:
                continue
            values = kinds[row.type] if row.codes is None else ", ".join(map(_literal, row.codes))
            steps = "" if row.of_steps else " (not of steps)"
            lines.append(f"| `{row.name}` | {values} | {_literal(row.default)} | {row.doc}{steps} |")
        return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


MLSTM, DELTA = Table(OPTIONS), Table(DELTA_OPTIONS)
# Of the mLSTM.
DEFAULTS, CODES, encode_all, encode = MLSTM.defaults, MLSTM.codes, MLSTM.encode_all, MLSTM.encode


if __name__ == "__main__":
    print(MLSTM.markdown(), DELTA.markdown(), sep="\n", end="")
