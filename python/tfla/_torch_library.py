"""The operators with all that PyTorch must know about them: kernels, shapes, derivatives, vmap."""

from tfla import _fake, _vmap  # noqa: F401  (register)
from tfla._autograd import call, call_alone, call_traced, transforms_active
from tfla._operators import (
    backward,
    backward_alone,
    forward,
    forward_alone,
    forward_with_rows,
    forward_with_rows_alone,
    forward_with_state,
    step,
    step_alone,
)

__all__ = [
    "backward",
    "backward_alone",
    "call",
    "call_alone",
    "call_traced",
    "forward",
    "forward_alone",
    "forward_with_rows",
    "forward_with_rows_alone",
    "forward_with_state",
    "step",
    "step_alone",
    "transforms_active",
]
