"""The operators for PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla import _torch_library as library
from tfla._options import (
    CHUNKWISE,
    GATES,
    HEAD_FIRST,
    NORMALIZERS,
    Gate,
    Layout,
    Normalizer,
    unknown,
)

__all__ = ["State", "mlstm"]


class State(NamedTuple):
    """The stabilised state of N sequences: the true C is C * exp(m), the true n is n * exp(m)."""

    C: Tensor  # (N,H,dqk,dhv)
    n: Tensor  # (N,H,dqk)
    m: Tensor  # (N,H)


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    gate: Gate = "exp",
    normalizer: Normalizer | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    qk_scale: float | None = None,
    eps: float = 1e-6,
    soft_cap: float | None = None,
    layout: Layout = "bthd",
    exact_normalizer_grad: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """The mLSTM over whole sequences."""
    C, n, m = initial_state if initial_state is not None else (None, None, None)
    try:
        gate_code, normalizer_code, head_first = GATES[gate], NORMALIZERS[normalizer], HEAD_FIRST[layout]
    except KeyError:
        raise _explain(gate, normalizer, layout) from None
    h, *state = library.forward(
        q, k, v, i, f, C, n, m, cu_seqlens, gate_code, normalizer_code, eps, qk_scale, soft_cap,
        exact_normalizer_grad, chunk_size or 0, CHUNKWISE, head_first, output_final_state,
    )  # fmt: skip
    return (h, State(*state)) if output_final_state else h


def _explain(gate: object, normalizer: object, layout: object) -> ValueError:
    for name, value, accepted in (
        ("gate", gate, GATES),
        ("normalizer", normalizer, NORMALIZERS),
        ("layout", layout, HEAD_FIRST),
    ):
        if value not in accepted:
            return unknown(name, value, accepted)
    raise AssertionError
