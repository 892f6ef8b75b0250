"""The functions of tfla.compat under torch.compile, without a graph break, forward and backward."""

import pytest
import torch
from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

import tfla.compat.mlstm_kernels
from inputs import make_inputs
from tfla.compat import fla
from tfla.compat.mamba import mamba_chunk_scan_combined
from tfla.reference import relative_error

tfla.compat.mlstm_kernels.register()
backend = mLSTMBackend(mLSTMBackendConfig(**tfla.compat.mlstm_kernels.kernel_names("sigmoid")))


def mlstm_kernels(q, k, v, i, f):
    h, (C, _, _) = backend(*(x.transpose(1, 2) for x in (q, k, v, i, f)))
    return h.square().sum() + C.square().sum()


def simple_gla(q, k, v, i, f):
    o, state = fla.chunk_simple_gla(q, k, v, torch.nn.functional.logsigmoid(f + 0 * i), output_final_state=True)
    return o.square().sum() + state.square().sum()


def linear_attention(q, k, v, i, f):
    o, (state, z) = fla.chunk_linear_attn(q.exp(), k.exp(), v, output_final_state=True)
    return o.square().sum() + state.square().sum() + z.square().sum() + 0 * (i + f).sum()


def gated_delta_rule(q, k, v, i, f):
    o, state = fla.chunk_gated_delta_rule(
        q, k, v, f, i, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=f[0, 0],
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=True,
    )  # fmt: skip
    return o.square().sum() + state.square().sum()


def mamba(q, k, v, i, f):
    out, state = mamba_chunk_scan_combined(
        v, i, -f[0, 0].exp(), k, q, 16, D=f[0, 1], dt_softplus=True, return_final_states=True
    )
    return out.square().sum() + state.square().sum()


@pytest.mark.parametrize("function", [mlstm_kernels, simple_gla, linear_attention, gated_delta_rule, mamba])
def test_compiles_whole(function):
    inputs = make_inputs(dtype=torch.float64)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (function, compiled):
        leaves = inputs.leaves()
        value = run(*leaves)
        value.backward()
        results.append([value, *(x.grad for x in leaves)])
    for x, y in zip(*results, strict=True):
        assert relative_error(x, y) < 1e-10
