"""The self-check of `python -m tfla`: small calls on a device against the recurrence in float64, through PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tfla.delta import delta_rule, delta_rule_step
from tfla.ops import State, mlstm, mlstm_parallel, mlstm_recurrent, mlstm_step
from tfla.reference import BOUNDS, delta_recurrence, recurrence, relative_error

VARIANTS: tuple[dict, ...] = ({}, {"normalizer": "none"}, {"gate": "sigmoid"}, {"gate": "sigmoid", "normalizer": "max"})


class Row(NamedTuple):
    """One call, and its largest error as a multiple of what is allowed."""

    name: str
    worst: str
    error: float

    @property
    def passed(self) -> bool:
        return self.error < 1


def _row(name: str, dtype: torch.dtype, errors: dict[str, float]) -> Row:
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return Row(f"{str(dtype).removeprefix('torch.')}, {name}", worst, errors[worst])


def _inputs(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 70, 2, 16), (2, 70, 2, 16), (2, 70, 4, 24), (2, 70, 4), (2, 70, 4)]
    q, k, v, i, f = (torch.randn(*shape, generator=generator) for shape in shapes)
    return [x.to(device, dtype) for x in (q, k, v, 2 * i - 2, f + 4)]


def run(device: str) -> list[Row]:
    """Every variant and dtype on the device: forward, last state, gradients and step."""
    rows = []
    for dtype, (bound, grad_bound) in BOUNDS.items():
        for options in VARIANTS:
            given = _inputs(dtype, torch.device(device))
            leaves = [x.requires_grad_() for x in given]
            exact = [x.detach().cpu().double().requires_grad_() for x in given]
            wanted, wanted_state = recurrence(*exact, **options)
            dh = torch.ones_like(wanted)
            wanted.backward(dh)
            h, state = mlstm(*leaves, output_final_state=True, **options)
            h.backward(torch.ones_like(h))
            errors = {"h": relative_error(h.cpu(), wanted) / bound}
            # A CPU multiplies in the dtype of the state; tensor cores take operands in that of q, k, v.
            state_bound = BOUNDS[state.C.dtype if device == "cpu" else dtype][0]
            errors["C"] = relative_error(state.C.cpu(), wanted_state[0]) / state_bound
            for name, x, y in zip("qkvif", leaves, exact, strict=True):
                assert x.grad is not None and y.grad is not None
                errors[f"d{name}"] = relative_error(x.grad.cpu(), y.grad) / grad_bound
            with torch.no_grad():
                for name, function in (("parallel", mlstm_parallel), ("recurrent", mlstm_recurrent)):
                    errors[name] = relative_error(function(*given, **options).cpu(), wanted) / bound
                pool = State.zeros(2, 4, 16, 24, device=device, dtype=state.C.dtype)
                tokens = [[x[:, t] for x in given] for t in range(70)]
                h = torch.stack([mlstm_step(q, k, v, i, f, pool, **options) for q, k, v, i, f in tokens], dim=1)
                errors["step"] = relative_error(h.cpu(), wanted) / bound
            rows.append(_row(", ".join(f"{key} {value}" for key, value in options.items()) or "default", dtype, errors))
        if device == "cpu":  # the delta rule has no other kernels
            rows.append(_delta_row(dtype))
    return rows


def _delta_row(dtype: torch.dtype) -> Row:
    """The delta rule with all that it fuses: forward, last state, gradients and step."""
    bound, grad_bound = BOUNDS[dtype]
    q, k, v, beta, g = _inputs(dtype, torch.device("cpu"))
    named = {"q": q, "k": k, "v": v, "beta": beta, "g": g - 4, "A_log": g[0, 0] - 6, "dt_bias": beta[0, 0]}
    options: dict[str, Any] = {"write": "sigmoid", "normalize_qk": True}
    leaves: dict[str, Any] = {name: x.detach().clone().requires_grad_() for name, x in named.items()}
    exact: dict[str, Any] = {name: x.detach().double().requires_grad_() for name, x in named.items()}
    wanted, wanted_state = delta_recurrence(**exact, **options)
    wanted.backward(torch.ones_like(wanted))
    h, state = delta_rule(**leaves, output_final_state=True, **options)
    h.backward(torch.ones_like(h))
    errors = {"h": relative_error(h, wanted) / bound}
    errors["C"] = relative_error(state, wanted_state) / BOUNDS[state.dtype][0]
    for name, x in leaves.items():
        errors[f"d{name}"] = relative_error(x.grad, exact[name].grad) / grad_bound
    with torch.no_grad():
        C = torch.zeros_like(state)
        steps = []
        for t in range(70):
            token: dict[str, Any] = {name: x[:, t] if x.dim() > 1 else x for name, x in named.items()}
            steps.append(delta_rule_step(**token, state=C, **options))
        h = torch.stack(steps, dim=1)
        errors["step"] = relative_error(h, wanted) / bound
    return _row("delta rule", dtype, errors)
