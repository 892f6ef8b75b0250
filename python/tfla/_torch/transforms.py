"""torch.func over the operators: it refuses what torch.library.register_autograd registers, so Functions stand in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch import Tensor

# Torch's own, and may be gone from a future one: calls are then slower, not wrong.
below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def transformed() -> bool:
    """Whether this call is inside a transformation of torch.func, or in forward mode, which such a Function refuses."""
    return transforms_active() or _forward_ad._current_level >= 0


def refusal(name: str) -> Callable[..., None]:
    """What stands for the derivative of a backward."""

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"tfla: {name} was asked for a second derivative (double backward); it has first derivatives only"
        )

    return refuse


def transformable(
    backward: Any, tensors: int, save: Callable[..., None], gradients: Callable[..., tuple], refuse: Callable[..., None]
) -> Callable[[Any, tuple], Any]:
    """A way to call operators for sequences, whose derivative is the operator `backward`. tensors: how many inputs come
    before the options; save(ctx, inputs, output) and gradients(backward, ctx, *grads) are what is registered too."""

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            with below_autograd():
                return backward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            pass

    Backward.backward = staticmethod(refuse)  # type: ignore[assignment]

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(operator: Any, options: tuple, *inputs: Any) -> Any:
            with below_autograd():
                return operator(*inputs, *options)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            save(ctx, (*inputs[2:], *inputs[1]), output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple:
            return (None, None, *gradients(Backward.apply, ctx, *grads)[:tensors])

    def call(operator: Any, inputs: tuple) -> Any:
        padded = (*inputs, *(None,) * (tensors - len(inputs)))
        return Forward.apply(operator, padded[tensors:], *padded[:tensors])

    return call
