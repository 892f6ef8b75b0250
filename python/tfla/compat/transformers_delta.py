"""The gated delta rule of Hugging Face models: Qwen3-Next, Qwen3.5 and OLMo Hybrid among them.

Their layers (projections, a causal convolution, the gated delta rule, a gated norm) call two functions of the module
that defines them, one for sequences and one for single tokens. `patch` of tfla.compat.transformers replaces these, so
that it holds for all models of such a module, also for those made before.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tfla.compat import fla_delta

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid")
FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")

_originals: dict[ModuleType, dict[str, Callable[..., Any]]] = {}


def _on_tfla(original: Callable[..., Any]) -> Callable[..., Any]:
    def gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """others: their chunk size, and what layers hand to every kernel; nothing that changes the result."""
        if query.device.type != "cpu":  # where there are no kernels of tfla yet
            return original(
                query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, **others,
            )  # fmt: skip
        if cu_seqlens is not None:
            # The operator would keep them apart; the convolution before it, as transformers has it here, does not.
            raise ValueError("tfla: cu_seq_lens_q is given; on the CPU this model's convolution mixes packed sequences")
        state = initial_state
        if state is not None:
            state = state.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
            if torch.is_grad_enabled() and state is initial_state:
                # The model copies the last state over the one given here, which backward still needs.
                state = state.clone()
        return fla_delta.run(
            query, key, value, beta, g, state, output_final_state, normalize_qk=use_qk_l2norm_in_kernel
        )

    return gated_delta_rule


def modules_of(model: nn.Module) -> set[ModuleType]:
    """The modules whose functions the gated delta net layers of a model call."""
    homes = {sys.modules[type(layer).__module__] for layer in model.modules() if _calls_them(type(layer))}
    return {home for home in homes if all(hasattr(home, name) for name in FUNCTIONS)}


def _calls_them(layer: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(layer.forward), "__code__", None)
    return code is not None and set(FUNCTIONS) <= set(code.co_names)


def known_modules() -> set[ModuleType]:
    """Those of the families that the installed transformers has."""
    found = set()
    for family in FAMILIES:
        name = f"transformers.models.{family}"
        if importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(f"{name}.modeling_{family}")
        if any(isinstance(x, type) and issubclass(x, nn.Module) and _calls_them(x) for x in vars(module).values()):
            found.add(module)
    return found


def replace(modules: set[ModuleType]) -> None:
    for module in modules - _originals.keys():
        _originals[module] = {name: getattr(module, name) for name in FUNCTIONS}
        for name, original in _originals[module].items():
            setattr(module, name, _on_tfla(original))


def restore() -> None:
    for module, functions in _originals.items():
        for name, original in functions.items():
            setattr(module, name, original)
    _originals.clear()
