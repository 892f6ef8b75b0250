"""Loads the operators of bindings/torch.cc, and names them."""

from __future__ import annotations

import torch

from tfla import _native
from tfla._options import OPTIONS

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
    raise ImportError(f"tfla: torch is {torch.__version__}; it must be 2.10 or newer")
torch.ops.load_library(_native.library("libtfla_torch.so"))

# Inputs of those for sequences, before their options: q, k, v, i, f, C, n, m, cu_seqlens. Those from m on have no
# gradient. What is at its default at the end may be left out.
TOKENS, DIFFERENTIABLE, TENSORS = 5, 7, 9
FORMULATION = TENSORS + [option.name for option in OPTIONS].index("formulation")

forward = torch.ops.tfla.mlstm.default  # h
forward_with_saved = torch.ops.tfla.mlstm_with_saved.default  # h, what backward would compute again
forward_with_state = torch.ops.tfla.mlstm_with_state.default  # h, C, n, m
forward_with_state_and_saved = torch.ops.tfla.mlstm_with_state_and_saved.default  # h, C, n, m, the same
backward = torch.ops.tfla.mlstm_backward.default  # dq, dk, dv, di, df, dC, dn
step = torch.ops.tfla.mlstm_step.default  # h; C, n, m in place

# The same with nothing but tensors, and without derivatives, for `fast_path`.
forward_alone = torch.ops.tfla._mlstm.default
forward_with_saved_alone = torch.ops.tfla._mlstm_with_saved.default
backward_alone = torch.ops.tfla._mlstm_backward.default
step_alone = torch.ops.tfla._mlstm_step.default

# What each returns for backward besides its own results, at the end of them.
SAVING = {forward: forward_with_saved, forward_with_state: forward_with_state_and_saved}
