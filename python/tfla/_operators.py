"""Loads the operators of bindings/torch.cc. Import `tfla._torch_library`, which registers the rest with them."""

from __future__ import annotations

import torch

from tfla import _native

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
    raise ImportError(f"tfla: torch is {torch.__version__}; it must be 2.10 or newer")
torch.ops.load_library(_native.library("libtfla_torch.so"))

forward = torch.ops.tfla.mlstm.default
forward_with_rows = torch.ops.tfla.mlstm_with_rows.default
forward_with_state = torch.ops.tfla.mlstm_with_state.default
backward = torch.ops.tfla.mlstm_backward.default
step = torch.ops.tfla.mlstm_step.default

# The same with nothing but tensors, and without derivatives: each further argument costs host time, one at its default
# too, and so does a derivative that is not asked for.
forward_alone = torch.ops.tfla._mlstm.default
forward_with_rows_alone = torch.ops.tfla._mlstm_with_rows.default
backward_alone = torch.ops.tfla._mlstm_backward.default
step_alone = torch.ops.tfla._mlstm_step.default

# Else PyTorch would have them pass through a kernel that looks for gradients to warn about.
_underived = torch.library.Library("tfla", "IMPL")
for _operator in (forward_alone, forward_with_rows_alone, backward_alone, step_alone):
    _underived.impl(_operator, torch.library.fallthrough_kernel, "Autograd")
