"""The operators with all that PyTorch must know about them: kernels, shapes, derivatives, vmap."""

from tfla import _fake, _vmap  # noqa: F401  (register)
from tfla._autograd import call, call_traced
from tfla._operators import backward, forward, forward_with_rows, forward_with_state, step, step_alone

__all__ = [
    "backward",
    "call",
    "call_traced",
    "forward",
    "forward_with_rows",
    "forward_with_state",
    "step",
    "step_alone",
]
