"""The gated delta rule of Hugging Face models: Qwen3-Next, Qwen3.5 and OLMo Hybrid among them.

Their layers (projections, a causal convolution, the gated delta rule, a gated norm) call two functions of the module
that defines them, one for sequences and one for single tokens. `patch` of tfla.compat.transformers replaces these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla.compat import fla_delta
from tfla.compat._replaced import Functions

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid")


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


LAYERS = Functions(FAMILIES, {"torch_chunk_gated_delta_rule": _on_tfla, "torch_recurrent_gated_delta_rule": _on_tfla})
