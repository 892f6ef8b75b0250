"""tfla.compat.mamba against Mamba-2's recurrence in float64, token by token."""

import pytest
import torch
import torch.nn.functional as F

from tfla.compat.mamba import mamba_chunk_scan_combined
from tfla.reference import relative_error

BATCH, T, H, G, P, N = 2, 41, 4, 2, 6, 8
BOUNDS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4), torch.bfloat16: (2.5e-3, 2.5e-3)}


def naive(x, dt, A, B, C, D=None, z=None, dt_bias=None, state=None, seq_idx=None, softplus=False, limit=None):
    batch, tokens, heads, _ = x.shape
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    dt = dt.clamp(*(limit or (0.0, None)))
    S = x.new_zeros(batch, heads, x.shape[3], B.shape[3]) if state is None else state
    rows, before = [], torch.zeros(batch, dtype=torch.long)
    for t in range(tokens):
        if seq_idx is not None:
            S = torch.where((seq_idx[:, t] == before)[:, None, None, None], S, torch.zeros_like(S))
            before = seq_idx[:, t]
        S = (
            torch.exp(dt[:, t] * A)[..., None, None] * S
            + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        )
        rows.append(torch.einsum("bhpn,bhn->bhp", S, C[:, t]))
    y = torch.stack(rows, 1)
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    return (y if z is None else y * F.silu(z)), S


def tensors(dtype, batch=BATCH, positive_dt=False):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dt = draw(batch, T, H)
    return {
        "x": draw(batch, T, H, P).to(dtype),
        "dt": (dt.abs() if positive_dt else dt).to(wide),
        "A": -torch.exp(draw(H)).to(wide),
        "B": draw(batch, T, G, N).to(dtype),
        "C": draw(batch, T, G, N).to(dtype),
    }


def leaves(xs, dtype=None):
    return {name: x.detach().to(dtype or x.dtype).clone().requires_grad_() for name, x in xs.items()}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "with_options", [(), ("D",), ("D2", "z", "dt_bias"), ("dt_bias", "state"), ("limit", "D", "state")], ids=str
)
def test_values_and_gradients(with_options, dtype):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    extra = {}
    if "D" in with_options:
        extra["D"] = draw(H).to(wide)
    if "D2" in with_options:
        extra["D"] = draw(H, P).to(wide)
    if "z" in with_options:
        extra["z"] = draw(BATCH, T, H, P).to(dtype)
    if "dt_bias" in with_options:
        extra["dt_bias"] = draw(H).to(wide)
    if "state" in with_options:
        extra["state"] = draw(BATCH, H, P, N).to(wide)
    limit = (0.1, 1.5) if "limit" in with_options else (0.0, float("inf"))
    given = leaves(tensors(dtype) | extra)
    wanted = leaves(tensors(dtype) | extra, torch.float64)
    arguments = {("initial_states" if name == "state" else name): x for name, x in given.items()}
    out, last = mamba_chunk_scan_combined(
        **arguments, chunk_size=16, dt_softplus=True, dt_limit=limit, return_final_states=True
    )
    expected, expected_last = naive(**wanted, softplus=True, limit=limit)
    assert out.dtype == dtype and last.shape == (BATCH, H, P, N)
    # The kernel's result is rounded, and once more with D or z in it.
    bound, grad_bound = BOUNDS[dtype]
    roundings = 2 if "D" in extra or "z" in extra else 1
    assert relative_error(out, expected) < bound * roundings
    assert relative_error(last, expected_last) < BOUNDS[wide][0]
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    dlast = torch.randn(last.shape, generator=generator, dtype=torch.float64)
    torch.autograd.backward([out, last], [dout, dlast.to(last.dtype)])
    torch.autograd.backward([expected, expected_last], [dout.double(), dlast])
    for name, x in given.items():
        assert relative_error(x.grad, wanted[name].grad) < grad_bound * roundings, name


def test_dt_of_zero_has_its_gradient():
    given = tensors(torch.float64, positive_dt=True)
    given["dt"][:, 3] = 0.0
    mine, wanted = leaves(given), leaves(given)
    mamba_chunk_scan_combined(**mine, chunk_size=16).square().sum().backward()
    naive(**wanted)[0].square().sum().backward()
    for name in given:
        assert relative_error(mine[name].grad, wanted[name].grad) < 1e-10, name
    assert mine["dt"].grad[:, 3].abs().min() > 0


def test_seq_idx_starts_afresh():
    given = tensors(torch.float64)
    seq_idx = torch.zeros(BATCH, T, dtype=torch.int32)
    seq_idx[0, 10:], seq_idx[0, 30:], seq_idx[1, 1:] = 1, 2, 5
    state = torch.randn(BATCH, H, P, N, dtype=torch.float64)
    mine, wanted = leaves(given), leaves(given)
    out, last = mamba_chunk_scan_combined(
        **mine, chunk_size=16, dt_softplus=True, seq_idx=seq_idx, initial_states=state, return_final_states=True
    )
    expected, expected_last = naive(**wanted, softplus=True, seq_idx=seq_idx.long(), state=state)
    assert relative_error(out, expected) < 1e-10
    assert relative_error(last, expected_last) < 1e-10
    out.square().sum().backward()
    expected.square().sum().backward()
    for name in given:
        assert relative_error(mine[name].grad, wanted[name].grad) < 1e-10, name


def test_an_initial_state_belongs_to_sequence_zero():
    given, state = tensors(torch.float64), torch.randn(BATCH, H, P, N, dtype=torch.float64)
    ones = torch.ones(BATCH, T, dtype=torch.int32)
    out = mamba_chunk_scan_combined(**given, chunk_size=16, dt_softplus=True, seq_idx=ones, initial_states=state)
    assert relative_error(out, mamba_chunk_scan_combined(**given, chunk_size=16, dt_softplus=True)) < 1e-12


@pytest.mark.parametrize("with_seq_idx", [False, True])
def test_packed_sequences(with_seq_idx):
    given, bounds = tensors(torch.float64, batch=1), [0, 5, 6, T]
    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor(bounds).diff())[None].int()
    out, last, states = mamba_chunk_scan_combined(
        **given, chunk_size=16, dt_softplus=True, cu_seqlens=torch.tensor(bounds), return_varlen_states=True,
        return_final_states=True, seq_idx=seq_idx if with_seq_idx else None, state_dtype=torch.float32,
    )  # fmt: skip
    assert states.dtype == torch.float32 and torch.equal(last, states[-1:])
    for s, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        part = {name: x if name == "A" else x[:, a:b] for name, x in given.items()}
        expected, expected_state = naive(**part, softplus=True)
        assert relative_error(out[:, a:b], expected) < 1e-10
        assert relative_error(states[s : s + 1], expected_state) < 1e-6
    only = mamba_chunk_scan_combined(
        **given, chunk_size=16, dt_softplus=True, cu_seqlens=torch.tensor(bounds), return_varlen_states=True
    )
    assert len(only) == 2 and only[1].shape == (3, H, P, N)


def test_states_for_packed_sequences():
    given, bounds = tensors(torch.float64, batch=1), [0, 5, T]
    state = torch.randn(2, H, P, N, dtype=torch.float64)
    out = mamba_chunk_scan_combined(
        **given, chunk_size=16, dt_softplus=True, cu_seqlens=torch.tensor(bounds), initial_states=state
    )
    part = {name: x if name == "A" else x[:, 5:] for name, x in given.items()}
    assert relative_error(out[:, 5:], naive(**part, softplus=True, state=state[1:])[0]) < 1e-10


WRONG = torch.zeros(H + 1)
REFUSED = [
    ({"A": WRONG}, r"A has shape \(5,\); it must be \(4,\)"),
    ({"D": torch.zeros(H, P + 1)}, r"D has shape \(4, 7\); it must be \(4,\) or \(4, 6\)"),
    ({"dt_bias": WRONG}, "dt_bias has shape"),
    ({"z": torch.zeros(BATCH, T, H)}, "z has shape"),
    ({"dt": torch.zeros(BATCH, T, 1)}, "dt has shape"),
    ({"seq_idx": torch.zeros(T)}, "seq_idx has shape"),
    ({"x": torch.zeros(T, H, P)}, "x has shape"),
    ({"B": torch.zeros(BATCH, T, 3, N)}, "k has shape"),
    ({"chunk_size": 0}, "chunk_size is 0"),
    ({"dt_limit": (-1.0, 1.0)}, "dt_limit is"),
    ({"return_varlen_states": True}, "return_varlen_states is True without cu_seqlens"),
    ({"initial_states": torch.zeros(BATCH, H, N, P + 1)}, "initial_state.C has shape"),
    (
        {
            "seq_idx": torch.zeros(BATCH, T),
            "cu_seqlens": torch.tensor([0, T]),
            "initial_states": torch.zeros(1, H, P, N),
        },
        "both seq_idx and cu_seqlens",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        mamba_chunk_scan_combined(**(tensors(torch.float32) | {"chunk_size": 16} | change))
