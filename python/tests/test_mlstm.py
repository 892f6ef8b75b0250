"""tfla.mlstm against the recurrence in float64: values and gradients."""

import pytest
import torch
from inputs import make_inputs
from reference import recurrence, relative_error

import tfla

BOUNDS = {  # of docs/numerics.md: h and gradients
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (2.5e-3, 2.5e-3),
    torch.float16: (4e-4, 4e-4),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalizer": "none"},
        {"gate": "sigmoid"},
        {"gate": "sigmoid", "normalizer": "max"},
        {"exact_normalizer_grad": True},
        {"qk_scale": 0.5, "eps": 1e-3, "soft_cap": 15.0},
    ],
    ids=str,
)
def test_values_and_gradients(dtype, options):
    given = make_inputs(qk_heads=1, dtype=dtype).leaves()
    wanted = given.map(lambda x: x.double()).leaves()
    h = tfla.mlstm(*given, **options)
    reference, _ = recurrence(*wanted, **options)
    dh = torch.randn_like(reference).to(dtype)
    h.backward(dh)
    reference.backward(dh.double())
    bound, grad_bound = BOUNDS[dtype]
    assert h.dtype == dtype
    assert relative_error(h, reference) < bound
    for name, x, y in zip("qkvif", given, wanted, strict=True):
        assert x.grad.dtype == dtype
        assert relative_error(x.grad, y.grad) < grad_bound, name
