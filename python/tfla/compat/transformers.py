"""The Hugging Face xLSTM on tfla's kernels, and models with the gated delta rule (`transformers_delta`) or Mamba-2
(`transformers_mamba2`).

    import tfla.compat.transformers

    tfla.compat.transformers.patch()             # models made from now on
    model = AutoModelForCausalLM.from_pretrained("NX-AI/xLSTM-7b")

With or without the package xlstm, in every mode of the config: training at any length, prefill and decoding. The names
of kernels in the config are left as they are, since transformers checks them against its own list; of them only
"siging" is read, which means the sigmoid input gate.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import tfla
from tfla.compat import _xlstm, transformers_delta, transformers_mamba2
from tfla.compat._xlstm import States

try:
    from transformers.models.xlstm import modeling_xlstm
except ImportError as error:
    raise ImportError(
        "tfla: transformers with xLSTM (4.56 or newer) is not installed; pip install transformers"
    ) from error

__all__ = ["Backend", "patch", "unpatch"]


class Backend(nn.Module):
    """In place of mLSTMBackend (of mlstm_kernels) and xLSTMBackend (of transformers): always (H, (C, N, M))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        **tokens: Tensor,
    ) -> tuple[Tensor, States]:
        """tokens: q, k, v, i, f from xlstm's layer; query, key, value, igate, fgate from that of transformers."""
        names = ("q", "k", "v", "i", "f") if "q" in tokens else ("query", "key", "value", "igate", "fgate")
        q, k, v, i, f = (tokens.pop(name) for name in names)
        if tokens:
            raise TypeError(f"tfla: {min(tokens)} is not an argument of the backend")
        config = self.config
        state = _xlstm.initial_state(q, v, c_initial, n_initial, m_initial)
        if state is not None and torch.is_grad_enabled():
            # The model copies the last state over the one given here, which backward still needs.
            C, n, m = state
            state = C.clone(), n.clone(), m.clone()
        return _xlstm.run(
            tfla.mlstm, q, k, v, i, f, state, gate="sigmoid" if "siging" in config.chunkwise_kernel else "exp",
            normalize=True, eps=config.eps, return_last_states=True,
            autocast_kernel_dtype=getattr(torch, config.autocast_kernel_dtype), chunk_size=config.chunk_size,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return "tfla"


# Of which patch() replaces functions, on the CPU.
_REPLACED = (transformers_delta.LAYERS, transformers_mamba2.LAYERS)
_original_init = modeling_xlstm.xLSTMBlock.__init__


def _backend_class() -> tuple[ModuleType, str]:
    """Where the layers of a block take their backend from."""
    if modeling_xlstm.external_xlstm:
        return importlib.import_module("xlstm.xlstm_large.model"), "mLSTMBackend"
    return modeling_xlstm, "xLSTMBackend"


def _patched_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    # Replaced while the block is made, not afterwards: their backend looks its kernels up, and a config that names
    # Triton's could not be loaded on a machine without Triton.
    module, name = _backend_class()
    original = getattr(module, name)
    setattr(module, name, Backend)
    try:
        _original_init(self, *args, **kwargs)
    finally:
        setattr(module, name, original)


def patch(model: nn.Module | None = None) -> None:
    """Gives every xLSTM model made from now on, or the given one, tfla's kernels.

    Models with the gated delta rule or Mamba-2: all of them, or with a model all of its kind, on the CPU; elsewhere
    they keep what they have.
    """
    if model is None:
        setattr(modeling_xlstm.xLSTMBlock, "__init__", _patched_init)  # noqa: B010
        for layers in _REPLACED:
            layers.replace(layers.known_modules())
        return
    blocks = [module for module in model.modules() if isinstance(module, modeling_xlstm.xLSTMBlock)]
    found = [layers.modules_of(model) for layers in _REPLACED]
    if not blocks and not any(found):
        raise ValueError(
            f"tfla: model is a {type(model).__name__} without xLSTM blocks, without the gated delta rule and without "
            "Mamba-2; patch takes a Hugging Face xLSTM, Qwen3-Next, Mamba-2 or a relative of these"
        )
    for layers, modules in zip(_REPLACED, found, strict=True):
        layers.replace(modules)
    for block in blocks:
        layer: Any = block.mlstm_layer
        layer.mlstm_backend = Backend(layer.mlstm_backend.config)


def unpatch() -> None:
    """Models made from now on, and all with the gated delta rule or Mamba-2, use the kernels they would have without
    patch()."""
    setattr(modeling_xlstm.xLSTMBlock, "__init__", _original_init)  # noqa: B010
    for layers in _REPLACED:
        layers.restore()
