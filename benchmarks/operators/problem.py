"""A call that is timed: its tensors, who computes it, and whether what they compute is right.

Axes have letters. B is the batch, T the tokens; a problem chooses the others. Before a call is timed, a slice of its
results is compared with the recurrence, token by token in float64: the first row of the batch, a few heads, and a
window of tokens at the begin and at the end of the sequence. Gradients are those of results in the slice alone, so that
no other rows and heads take part; and those of a token need no tokens before it but their last state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

Given = dict[str, Tensor]
Call = Callable[[], Tensor]
WINDOW = 128  # tokens
# Operands, products and results of 16 bits are rounded to 8 bits each; what is wrong is apart by much more.
BOUNDS = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-5, torch.float32: 1e-4, torch.float64: 1e-9}
GRADIENT_SEED, STATE = 2, "state"


class Wrong(Exception):
    """A result that is not timed."""


class Problem(ABC):
    operation: str  # forward, training or step
    axes: ClassVar[dict[str, str]]  # of every argument, "y" and "state"; a step has no T
    sides: tuple[str, ...]  # tfla first
    ends_too: bool = True  # whether there is a reference for the window at the end

    @abstractmethod
    def draw(self, device: str) -> Given:
        """Arguments; for a step a state among them."""

    @abstractmethod
    def narrow(self) -> dict[str, int]:
        """How much of an axis the slice has, besides B and T: of the heads, say."""

    @abstractmethod
    def first_state(self, given: Given) -> Tensor:
        """Of zeros."""

    @abstractmethod
    def token(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        """y and the next state by the formula, differentiable, of arguments without an axis of tokens."""

    def reference(self, given: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of all tokens, one after the other."""
        state = self.first_state(given) if state is None else state
        columns = {name: x.unbind(axes.index("T")) for name, x in given.items() if "T" in (axes := self.axes[name])}
        rows = []
        for t in range(len(next(iter(columns.values())))):
            y, state = self.token(given | {name: column[t] for name, column in columns.items()}, state)
            rows.append(y)
        return torch.stack(rows, self.axes["y"].index("T")), state

    @abstractmethod
    def side(self, name: str, given: Given) -> Call:
        """What computes y, on a state in place. Raises where there is no such package."""

    @property
    def dtype(self) -> torch.dtype:
        """Of y."""
        return torch.bfloat16

    def leaves(self, given: Given) -> Given:
        """What training has gradients of."""
        return {name: x for name, x in given.items() if name != STATE}


def prepared(problem: Problem, given: Given) -> Given:
    training = problem.operation == "training"
    return {name: x.requires_grad_(training and name != STATE) for name, x in given.items()}


def timed_call(problem: Problem, given: Given, call: Call) -> Callable[[], object]:
    """What is timed: y, and in training the gradients too."""
    if problem.operation != "training":
        return torch.no_grad()(call)
    leaves = list(problem.leaves(given).values())
    dy = result_gradient(call().detach())
    return lambda: torch.autograd.grad(call(), leaves, dy)


def result_gradient(y: Tensor) -> Tensor:
    generator = torch.Generator(y.device).manual_seed(GRADIENT_SEED)
    return torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype)


# ---------------------------------------------------------------- right or wrong


def check(problem: Problem, given: Given, call: Call) -> float:
    """The largest relative difference from float64 of all that is compared; raises Wrong."""
    if problem.operation == "step":
        found = step_differences(problem, given, call)
    else:
        tokens = given_tokens(problem, given)
        windows = [(0, min(WINDOW, tokens))]
        if problem.ends_too and tokens > WINDOW:
            windows.append((tokens - WINDOW, tokens))
        found = {}
        for window in windows:
            found |= window_differences(problem, given, call, window)
    bound = BOUNDS[problem.dtype]
    for name, apart in found.items():
        if not apart < bound:  # NaN too
            raise Wrong(f"{name} is {apart:.1e} apart from float64, more than {bound:.0e}; not timed")
    return max(found.values())


def given_tokens(problem: Problem, given: Given) -> int:
    name = next(name for name, axes in problem.axes.items() if "T" in axes and name in given)
    return given[name].shape[problem.axes[name].index("T")]


def cut(problem: Problem, name: str, x: Tensor, window: tuple[int, int] | None = None) -> Tensor:
    """The slice's part of an argument or its gradient."""
    sizes = {"B": 1} | problem.narrow()
    axes = problem.axes[name].replace("T", "") if problem.operation == "step" else problem.axes[name]
    ranges: list[Any] = [slice(*window) if axis == "T" and window else slice(sizes.get(axis)) for axis in axes]
    return x[tuple(ranges)]


def wide(problem: Problem, given: Given, window: tuple[int, int] | None = None) -> Given:
    return {name: cut(problem, name, x.detach(), window).double() for name, x in given.items()}


def difference(found: Tensor, expected: Tensor) -> float:
    size = float(expected.norm()) or 1.0
    return float((found.double() - expected).norm()) / size


def window_differences(problem: Problem, given: Given, call: Call, window: tuple[int, int]) -> dict[str, float]:
    begin, end = window
    training, where = problem.operation == "training", f"in tokens {begin:,} to {end:,}"
    before: Tensor | None = None
    with torch.no_grad():
        if begin:
            _, before = problem.reference(wide(problem, given, (0, begin)), None)
    leaves = {name: x.requires_grad_(training) for name, x in wide(problem, given, window).items()}
    expected, _ = problem.reference(leaves, before)
    with torch.set_grad_enabled(training):
        y = call()
    if not torch.isfinite(y).all():
        raise Wrong("y is not finite everywhere; not timed")
    apart = {f"y {where}": difference(cut(problem, "y", y.detach(), window), expected.detach())}
    if not training:
        return apart
    dy = torch.zeros_like(y)
    cut(problem, "y", dy, window).copy_(cut(problem, "y", result_gradient(y.detach()), window))
    gradients = torch.autograd.grad(y, list(problem.leaves(given).values()), dy)
    theirs = torch.autograd.grad(expected, list(leaves.values()), cut(problem, "y", dy, window).double())
    for name, mine, right in zip(leaves, gradients, theirs, strict=True):
        if not torch.isfinite(mine).all():
            raise Wrong(f"the gradient of {name} is not finite everywhere; not timed")
        # What has no axis of tokens acts on those before the window too.
        if begin == 0 or "T" in problem.axes[name]:
            apart[f"the gradient of {name} {where}"] = difference(cut(problem, name, mine, window), right)
    return apart


def step_differences(problem: Problem, given: Given, call: Call) -> dict[str, float]:
    """A step on a state in place. The state is put back."""
    first = given[STATE].clone()
    arguments = wide(problem, given)
    with torch.no_grad():
        expected, after = problem.token(arguments, arguments[STATE])
        y = call()
    apart = {
        "y": difference(cut(problem, "y", y), expected),
        "the state": difference(cut(problem, STATE, given[STATE]), after),
    }
    given[STATE].copy_(first)
    return apart
