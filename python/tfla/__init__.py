"""tfla: the mLSTM operator (Tiled Flash Linear Attention) for PyTorch and JAX, on CPU and CUDA.

    h = tfla.mlstm(q, k, v, i, f)                      # PyTorch: q, k (B,T,H,dqk)  v, h (B,T,H,dhv)  i, f (B,T,H)
    h = tfla.jax.mlstm(q, k, v, i, f)                  # JAX, the same shapes
    h = tfla.delta_rule(q, k, v, beta, g)              # the gated delta rule, on the CPU; also in tfla.jax
    y = tfla.ssd(x, dt, A, B, C)                       # Mamba-2's state space dual; also in tfla.jax
    y = tfla.causal_conv1d(x, weight, activation="silu")   # the short convolution before them, on the CPU

Importing this module imports neither framework: each is loaded with the first attribute that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfla import analysis, check, distributed, info, lm, nn, ops, reference
    from tfla.conv import causal_conv1d, causal_conv1d_step
    from tfla.delta import delta_rule, delta_rule_step
    from tfla.ops import State, mlstm, mlstm_parallel, mlstm_recurrent, mlstm_step
    from tfla.state_space import ssd, ssd_step

__version__ = "0.1.0"
__all__ = [
    "State",
    "analysis",
    "causal_conv1d",
    "causal_conv1d_step",
    "check",
    "delta_rule",
    "delta_rule_step",
    "distributed",
    "info",
    "lm",
    "mlstm",
    "mlstm_parallel",
    "mlstm_recurrent",
    "mlstm_step",
    "nn",
    "ops",
    "reference",
    "ssd",
    "ssd_step",
]

_FROM = {name: "tfla.ops" for name in ("State", "mlstm", "mlstm_parallel", "mlstm_recurrent", "mlstm_step")}
_FROM |= {name: "tfla.delta" for name in ("delta_rule", "delta_rule_step")}
_FROM |= {name: "tfla.state_space" for name in ("ssd", "ssd_step")}
_FROM |= {name: "tfla.conv" for name in ("causal_conv1d", "causal_conv1d_step")}
_INSTEAD = {"torch": "tfla.jax", "jax": "tfla.mlstm and torch"}
_MODULES = ("analysis", "check", "compat", "distributed", "info", "jax", "lm", "nn", "ops", "reference")

if not TYPE_CHECKING:  # which sees the imports above, and would otherwise believe in any name

    def __getattr__(name: str) -> Any:
        if name not in _FROM and name not in _MODULES:
            raise AttributeError(f"module 'tfla' has no attribute '{name}'")
        try:
            value = importlib.import_module(_FROM.get(name, f"tfla.{name}"))
        except ModuleNotFoundError as error:
            if error.name not in _INSTEAD:
                raise
            raise ImportError(
                f"tfla: tfla.{name} needs {error.name}, which is not installed; pip install {error.name}, "
                f"or use {_INSTEAD[error.name]}",
                name=error.name,
            ) from error
        if name in _FROM:
            value = getattr(value, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
