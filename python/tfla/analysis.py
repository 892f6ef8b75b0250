"""The paper's cost model: operations and bytes of the mLSTM, and the time and best chunk size that follow on a machine.

    import tfla.analysis as analysis
    model = analysis.Model(gate="exp", dqk=128, dhv=256)
    flops, bytes = analysis.counts(model)                     # of one head and chunk, as polynomials in its length
    analysis.best_chunk(model, analysis.accelerator("H100"))  # where flops / rate + bytes / bandwidth is least

Needs neither torch nor jax. docs/paper.md has the tables, and what they say.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Literal

from tfla import _native
from tfla._options import CODES

__all__ = [
    "Accelerator", "Model", "Polynomial", "accelerator", "accelerators", "best_chunk", "counts", "flop_optimal_chunk",
    "roofline", "total",
]  # fmt: skip

_PASSES = {"forward": 0, "backward": 1}
_FORMULATIONS = CODES.formulation
_GATES = {"exp": CODES.gate["exp"], "sig": CODES.gate["sigmoid"]}  # as the paper calls them


@dataclass(frozen=True)
class Model:
    """What is counted. The paper's own setting is the default; `f_*` are the operations one function counts for."""

    gate: Literal["exp", "sig"] = "sig"  # exponential with its normalizer and max state, sigmoid without
    formulation: Literal["chunkwise", "parallel", "recurrent"] = "chunkwise"
    direction: Literal["forward", "backward"] = "forward"
    dqk: float = 256
    dhv: float = 512
    f_exp: float = 1
    f_log: float = 1
    f_sig: float = 1
    f_max: float = 1
    f_abs: float = 1
    f_mask: float = 1
    f_causal: float = 0.5  # the share of a square that causality leaves
    bytes_qkv: float = 2
    bytes_gates: float = 2
    bytes_states: float = 4


@dataclass(frozen=True)
class Polynomial:
    """A count for one head and one unit of x tokens: a chunk, the whole sequence (parallel), one token (recurrent)."""

    constant: float
    linear: float
    quadratic: float

    def __call__(self, x: float) -> float:
        return self.constant + x * (self.linear + x * self.quadratic)


@dataclass(frozen=True)
class Accelerator:
    name: str
    year: int
    flops: float  # per second, bfloat16 matrix products without sparsity
    bandwidth: float  # bytes per second
    source: str = ""

    @property
    def intensity(self) -> float:
        return self.flops / self.bandwidth


_CHOICES = ("direction", "formulation", "gate", "unused")
_REALS = (
    "dqk", "dhv", "f_exp", "f_log", "f_sig", "f_max", "f_abs", "f_mask", "f_causal", "bytes_qkv", "bytes_gates",
    "bytes_states",
)  # fmt: skip


class _Numbers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in _CHOICES] + [(name, ctypes.c_double) for name in _REALS]


_Coefficients = ctypes.c_double * 3


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_native.library("libtfla_analysis.so"))
    library.tfla_analysis_error.restype = ctypes.c_char_p
    number = ctypes.c_double
    for name, arguments in {
        "tfla_analysis_total": [_Coefficients, ctypes.c_int32, number, number, number, number],
        "tfla_analysis_best_chunk": [_Coefficients, _Coefficients, number, number, ctypes.c_bool],
        "tfla_analysis_flop_optimal_chunk": [_Coefficients],
        "tfla_analysis_roofline": [number, number, number],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    return library


def _choice(name: str, value: str, choices: dict[str, int]) -> int:
    if value not in choices:
        raise ValueError(f"tfla: {name} was {value!r}; it must be one of {', '.join(choices)}")
    return choices[value]


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"tfla: {name} was {value}; it must be positive and finite")


def _coefficients(count: Polynomial) -> ctypes.Array[ctypes.c_double]:
    return _Coefficients(count.constant, count.linear, count.quadratic)


def counts(model: Model) -> tuple[Polynomial, Polynomial]:
    """FLOPs and bytes by the exact tables, as polynomials in the length of the unit."""
    _positive(dqk=model.dqk, dhv=model.dhv)
    numbers = _Numbers(
        _choice("direction", model.direction, _PASSES),
        _choice("formulation", model.formulation, _FORMULATIONS),
        _choice("gate", model.gate, _GATES),
        0,
        *(getattr(model, name) for name in _REALS),
    )
    flops, moved = _Coefficients(), _Coefficients()
    if _library().tfla_analysis_counts(ctypes.byref(numbers), flops, moved) != 0:
        raise ValueError(_library().tfla_analysis_error().decode())
    return Polynomial(*flops), Polynomial(*moved)


def total(count: Polynomial, model: Model, *, tokens: float, chunk: float, batch: float = 1, heads: float = 1) -> float:
    """A count over a whole (batch, heads, T) of this model's formulation."""
    _positive(tokens=tokens, chunk=chunk, batch=batch, heads=heads)
    formulation = _choice("formulation", model.formulation, _FORMULATIONS)
    return _library().tfla_analysis_total(_coefficients(count), formulation, batch, heads, tokens, chunk)


def flop_optimal_chunk(model: Model) -> float:
    """The chunk size with the fewest operations per token."""
    return _library().tfla_analysis_flop_optimal_chunk(_coefficients(counts(model)[0]))


def best_chunk(model: Model, machine: Accelerator, *, overlapped: bool = False) -> float:
    """The chunk size with the least time per token: the sum of arithmetic and memory, or the longer of the two."""
    flops, moved = map(_coefficients, counts(model))
    return _library().tfla_analysis_best_chunk(flops, moved, machine.flops, machine.bandwidth, overlapped)


def roofline(machine: Accelerator, intensity: float) -> float:
    """FLOPs per second that a method with this arithmetic intensity can reach at most."""
    return _library().tfla_analysis_roofline(machine.flops, machine.bandwidth, intensity)


@functools.cache
def accelerators() -> tuple[Accelerator, ...]:
    """The machines of the paper, and those measured here."""
    found: list[Accelerator] = []
    name, source = ctypes.c_char_p(), ctypes.c_char_p()
    year, flops, bandwidth = ctypes.c_int32(), ctypes.c_double(), ctypes.c_double()
    ask = _library().tfla_analysis_accelerator
    out = [ctypes.byref(x) for x in (name, year, flops, bandwidth, source)]
    while ask(len(found), *out) == 0:
        texts = [(text.value or b"").decode() for text in (name, source)]
        found.append(Accelerator(texts[0], year.value, flops.value, bandwidth.value, texts[1]))
    return tuple(found)


def accelerator(name: str) -> Accelerator:
    """One of `accelerators` by its name."""
    for machine in accelerators():
        if machine.name == name:
            return machine
    raise ValueError(f"tfla: accelerator was {name!r}; known are {', '.join(m.name for m in accelerators())}")
