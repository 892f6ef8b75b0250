"""tfla's kernels in the registries of mlstm_kernels.

    import tfla.compat.mlstm_kernels as compat

    compat.register()
    config = xLSTMLargeConfig(..., **compat.kernel_names("exp"))     # or mLSTMBackendConfig

    registry         name                                    what it computes
    chunkwise        chunkwise--tfla                         exponential input gate, any length
                     chunkwise--tfla_siging                  sigmoid input gate, normalize=True by default
                     chunkwise--tfla_siging_unnormalized     sigmoid input gate without a denominator
    parallel         parallel--tfla, parallel--tfla_siging   the same, quadratic in the length, without states
    step             tfla, tfla_siging, tfla_siging_unnormalized
    sequence         tfla, tfla_siging, tfla_siging_unnormalized

A state of the sigmoid gate is a triple too, with M = 0, so that training, prefill and decoding pass it around alike.
mLSTMBackend does not tell its kernels for inference about normalize_siging: that is what the third name is for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tfla
from tfla._options import DEFAULTS
from tfla.compat import _xlstm
from tfla.compat._xlstm import InputGate, States

__all__ = [
    "kernel_names",
    "mlstm_chunkwise",
    "mlstm_chunkwise_siging",
    "mlstm_parallel",
    "mlstm_parallel_siging",
    "mlstm_sequence",
    "mlstm_step",
    "register",
]


def mlstm_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = DEFAULTS.eps,
    chunk_size: int = 64,
    autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, States]:
    """The exponential gate: q, k (B,NH,S,DHQK), v (B,NH,S,DHHV), i, f (B,NH,S) -> H, or (H, (C, N, M)). Any S."""
    state = _xlstm.initial_state(q, v, c_initial, n_initial, m_initial)
    return _xlstm.run(
        tfla.mlstm, q, k, v, i, f, state, gate="exp", normalize=True, eps=eps, return_last_states=return_last_states,
        autocast_kernel_dtype=autocast_kernel_dtype, chunk_size=chunk_size,
    )  # fmt: skip


def mlstm_chunkwise_siging(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = DEFAULTS.eps,
    normalize: bool = True,
    chunk_size: int = 64,
    autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, States]:
    """The sigmoid gate. m_initial may be left out with a state, since M is 0."""
    if c_initial is not None and m_initial is None:
        m_initial = c_initial.new_zeros((*c_initial.shape[:2], 1))
    state = _xlstm.initial_state(q, v, c_initial, n_initial, m_initial)
    return _xlstm.run(
        tfla.mlstm, q, k, v, i, f, state, gate="sigmoid", normalize=normalize, eps=eps,
        return_last_states=return_last_states, autocast_kernel_dtype=autocast_kernel_dtype, chunk_size=chunk_size,
    )  # fmt: skip


def _unnormalized(*arguments: Any, normalize: bool = False, **options: Any) -> Any:
    if normalize:
        raise ValueError("tfla: normalize is True for a kernel named unnormalized; set normalize_siging=False")
    return partial(mlstm_chunkwise_siging, normalize=False)(*arguments, **options)


def mlstm_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = DEFAULTS.eps,
    chunk_size: int | None = None,
    autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The exponential gate in the parallel formulation, from and to no state, as in mlstm_kernels. It has no chunks:
    chunk_size is there because mLSTMBackend hands it to every kernel."""
    return _parallel("exp", True, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
                     autocast_kernel_dtype)  # fmt: skip


def mlstm_parallel_siging(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = DEFAULTS.eps,
    stable_fgate: bool = True,
    normalize: bool = True,
    chunk_size: int | None = None,
    autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The sigmoid gate in the parallel formulation. Sums of log f are always taken in double: stable_fgate=False, the
    way that loses digits, does not exist."""
    if not stable_fgate:
        raise ValueError("tfla: stable_fgate is False; the forget gates are always summed the stable way")
    return _parallel("sigmoid", normalize, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
                     autocast_kernel_dtype)  # fmt: skip


def _parallel(gate: InputGate, normalize: bool, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor | None,
              n: Tensor | None, m: Tensor | None, return_last_states: bool, eps: float,
              autocast_kernel_dtype: torch.dtype) -> Tensor:  # fmt: skip
    given = {"c_initial": c, "n_initial": n, "m_initial": m, "return_last_states": return_last_states or None}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"tfla: {name} is given to a parallel kernel, which has no states; use a chunkwise one")
    return _xlstm.run(
        tfla.mlstm_parallel, q, k, v, i, f, None, gate=gate, normalize=normalize, eps=eps, return_last_states=False,
        autocast_kernel_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def mlstm_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = DEFAULTS.eps,
    dtype_state: torch.dtype = torch.float32,
    *,
    gate: InputGate = "exp",
    normalize: bool = True,
) -> Tensor | tuple[Tensor, States]:
    """Token by token, in one call."""
    state = _xlstm.initial_state(q, v, c_initial, n_initial, m_initial)
    return _xlstm.run(
        tfla.mlstm_recurrent, q, k, v, i, f, state, gate=gate, normalize=normalize, eps=eps,
        return_last_states=return_last_states, dtype_state=dtype_state,
    )  # fmt: skip


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor,
    eps: float = DEFAULTS.eps,
    dtype_state: torch.dtype = torch.float32,
    *,
    gate: InputGate = "exp",
    normalize: bool = True,
) -> tuple[Tensor, States]:
    """One token: q, k (B,NH,DHQK), v (B,NH,DHHV), i, f (B,NH,1) -> (h, (C, N, M)) in new tensors."""
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    h, state = mlstm_sequence(q, k, v, i, f, c, n, m, True, eps, dtype_state, gate=gate, normalize=normalize)
    return h.squeeze(2), state


def _decoding(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        "tfla": function,
        "tfla_siging": partial(function, gate="sigmoid"),
        "tfla_siging_unnormalized": partial(function, gate="sigmoid", normalize=False),
    }


def register() -> list[str]:
    """Adds our kernels to the registries of the installed mlstm_kernels; returns the names of those for sequences."""
    try:
        from mlstm_kernels.torch import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            chunkwise,
            parallel,
            recurrent,
        )
    except ImportError as error:
        raise ImportError("tfla: mlstm_kernels is not installed; pip install mlstm_kernels") from error
    chunkwise_kernels = {
        "tfla": mlstm_chunkwise,
        "tfla_siging": mlstm_chunkwise_siging,
        "tfla_siging_unnormalized": _unnormalized,
    }
    parallel_kernels = {"tfla": mlstm_parallel, "tfla_siging": mlstm_parallel_siging}
    chunkwise.registry.update(chunkwise_kernels)
    parallel.registry.update(parallel_kernels)
    recurrent.registry_step.update(_decoding(mlstm_step))
    recurrent.registry_sequence.update(_decoding(mlstm_sequence))
    return [*(f"chunkwise--{name}" for name in chunkwise_kernels), *(f"parallel--{name}" for name in parallel_kernels)]


def kernel_names(gate: InputGate = "exp", *, normalize: bool = True) -> dict[str, str]:
    """chunkwise_kernel, sequence_kernel and step_kernel of a config, so that training and decoding use one gate."""
    if gate not in ("exp", "sigmoid"):
        raise ValueError(f"tfla: gate is {gate!r}; it must be 'exp' or 'sigmoid'")
    if gate == "exp" and not normalize:
        raise ValueError("tfla: normalize is False for the exponential gate, which mlstm_kernels always normalizes")
    name = "tfla" if gate == "exp" else "tfla_siging" if normalize else "tfla_siging_unnormalized"
    return {"chunkwise_kernel": f"chunkwise--{name}", "sequence_kernel": name, "step_kernel": name}
