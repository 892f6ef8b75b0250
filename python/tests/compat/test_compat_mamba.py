"""tfla.compat.mamba against Mamba-2's recurrence in float64, token by token."""

import pytest
import torch
import torch.nn.functional as F

from ssd_inputs import BATCH, N, P, at, extras, leaves, naive, tensors, wide
from ssd_inputs import GROUPS as G
from ssd_inputs import HEADS as H
from ssd_inputs import TOKENS as T
from tfla.compat.mamba import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from tfla.reference import relative_error

BOUNDS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4), torch.bfloat16: (2.5e-3, 2.5e-3)}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "with_options", [(), ("D",), ("D2", "z", "dt_bias"), ("dt_bias", "state"), ("limit", "D", "state")], ids=str
)
def test_values_and_gradients(with_options, dtype):
    extra = extras(dtype, with_options)
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
    assert relative_error(last, expected_last) < BOUNDS[wide(dtype)][0]
    generator = torch.Generator().manual_seed(2)
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
        part = at(given, slice(a, b))
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
    part = at(given, slice(5, None))
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
    ({"B": torch.zeros(BATCH, T, 3, N)}, "B has shape"),
    ({"chunk_size": 0}, "chunk_size is 0"),
    ({"dt_limit": (-1.0, 1.0)}, "dt_limit is"),
    ({"return_varlen_states": True}, "return_varlen_states is True without cu_seqlens"),
    ({"initial_states": torch.zeros(BATCH, H, N, P + 1)}, "initial_state has shape"),
    (
        {
            "seq_idx": torch.zeros(BATCH, T, dtype=torch.int32),
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


# ---------------------------------------------------------------- the whole layer behind its first projection

WIDTH = 3


def split_arguments(dtype=torch.float64, mlp=0, D_axes=1):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    channels = H * P + 2 * G * N
    given = {
        "zxbcdt": draw(BATCH, T, 2 * mlp + H * P + channels + H), "conv1d_weight": draw(channels, WIDTH) / 2,
        "conv1d_bias": draw(channels), "dt_bias": draw(H), "A": -draw(H).exp(), "D": draw(*(H, P)[:D_axes]),
        "rmsnorm_weight": draw(H * P), "outproj_weight": draw(5, mlp + H * P), "outproj_bias": draw(5),
    }  # fmt: skip
    return given


def split_naive(given, seq_idx=None, limit=None, state=None, eps=1e-6, norm_before_gate=True):
    """In plain tensors, one tap of the convolution and one group of the norm after another."""
    channels, mlp = given["conv1d_weight"].shape[0], given["zxbcdt"].shape[-1] - 2 * H * P - 2 * G * N - H
    first, z, xBC, dt = given["zxbcdt"].split([mlp, H * P, channels, H], -1)
    total = torch.zeros_like(xBC) if given["conv1d_bias"] is None else given["conv1d_bias"].expand(xBC.shape)
    for back in range(WIDTH):
        moved = F.pad(xBC, (0, 0, back, 0))[:, :T]
        if seq_idx is not None:
            moved = moved * (F.pad(seq_idx, (back, 0), value=-1)[:, :T] == seq_idx)[..., None]
        total = total + moved * given["conv1d_weight"][:, -1 - back]
    x, B, C = (total * torch.sigmoid(total)).split([H * P, G * N, G * N], -1)
    x, B, C = (part.unflatten(-1, (count, -1)) for part, count in ((x, H), (B, G), (C, G)))
    options = {"seq_idx": seq_idx, "softplus": True, "limit": limit, "state": state}
    y, last = naive(x, dt, given["A"], B, C, given["D"], None, given["dt_bias"], **options)
    y, gate = y.flatten(-2), z * torch.sigmoid(z)
    if given.get("rmsnorm_weight") is None:
        y = y * gate
    else:
        y = y if norm_before_gate else y * gate
        parts = [part / (part.square().mean(-1, True) + eps).sqrt() for part in y.chunk(G, -1)]
        y = torch.cat(parts, -1) * given["rmsnorm_weight"] * (gate if norm_before_gate else 1)
    if mlp:
        a, b = first.chunk(2, -1)
        y = torch.cat([a * torch.sigmoid(a) * b, y], -1)
    return (y if given.get("outproj_weight") is None else y @ given["outproj_weight"].T + given["outproj_bias"]), last


SPLIT = [
    {},
    {"norm_before_gate": False, "rmsnorm_eps": 0.1, "dt_limit": (0.2, 1.0)},
    {"without": ("rmsnorm_weight", "conv1d_bias"), "D_axes": 2, "activation": "swish"},
    {"without": ("outproj_weight", "outproj_bias"), "mlp": 7},
    {"mlp": 2, "seq_idx": True},
    {"state": True},
]


@pytest.mark.parametrize("change", SPLIT, ids=str)
def test_split_values_and_gradients(change):
    options = dict(change)
    sizes = {name: options.pop(name) for name in ("mlp", "D_axes") if name in options}
    without, plain = options.pop("without", ()), {}
    seq_idx = None
    if options.pop("seq_idx", False):
        seq_idx = options["seq_idx"] = torch.zeros(BATCH, T, dtype=torch.int32)
        seq_idx[0, 10:], seq_idx[0, 11:], seq_idx[1, 1:] = 1, 2, 5
    if options.pop("state", False):
        options["initial_states"] = plain["state"] = torch.randn(BATCH, H, P, N, dtype=torch.float64)
    for name, theirs in (("dt_limit", "limit"), ("rmsnorm_eps", "eps"), ("norm_before_gate", "norm_before_gate")):
        plain |= {theirs: options[name]} if name in options else {}
    given = split_arguments(**sizes)
    mine, wanted = leaves(given), leaves(given)
    for side in (mine, wanted):
        side |= dict.fromkeys(without)
    out, last = mamba_split_conv1d_scan_combined(
        **mine, chunk_size=16, headdim=None if "D_axes" in sizes else P, ngroups=G, return_final_states=True, **options
    )
    expected, expected_last = split_naive(wanted, seq_idx, **plain)
    assert relative_error(out, expected) < 1e-10 and relative_error(last, expected_last) < 1e-10
    weights = torch.randn_like(expected)
    for value, state in ((out, last), (expected, expected_last)):
        ((value * weights).sum() + state.square().sum()).backward()
    for name, x in mine.items():
        assert x is None or relative_error(x.grad, wanted[name].grad) < 1e-10, name


def test_split_returns_out_alone_in_its_dtype():
    given = split_arguments(torch.bfloat16)
    out = mamba_split_conv1d_scan_combined(**given, chunk_size=16, headdim=P, ngroups=G)
    expected, _ = split_naive({name: x.double() for name, x in given.items()})
    # Convolution, scan, norm and product each round to bfloat16.
    assert out.dtype == torch.bfloat16 and relative_error(out, expected) < 4 * 2.0**-8


def test_split_compiles_whole():
    given = split_arguments() | {"seq_idx": torch.arange(T)[None].expand(BATCH, T) // 9}

    def out(**named):
        return mamba_split_conv1d_scan_combined(**named, chunk_size=16, headdim=P, ngroups=G)

    compiled = torch.compile(out, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(**given), out(**given)) < 1e-12


SPLIT_REFUSED = [
    ({"activation": None}, "activation is None; it must be 'silu' or 'swish'"),
    ({"headdim": None}, "headdim is missing"),
    ({"outproj_weight": None}, "outproj_bias is given without outproj_weight"),
    ({"headdim": 10 * P}, "conv1d_weight has shape"),
    ({"zxbcdt": torch.zeros(BATCH, T, 9)}, "zxbcdt has shape"),
]


@pytest.mark.parametrize(("change", "sentence"), SPLIT_REFUSED, ids=[sentence for _, sentence in SPLIT_REFUSED])
def test_split_refused(change, sentence):
    given = split_arguments() | {"chunk_size": 16, "headdim": P, "ngroups": G}
    with pytest.raises(ValueError, match=f"^tfla: {sentence}"):
        mamba_split_conv1d_scan_combined(**(given | change))


def test_split_of_no_tokens():
    given = split_arguments()
    given["zxbcdt"] = given["zxbcdt"][:, :0]
    numbers = torch.zeros(BATCH, 0, dtype=torch.int32)
    out = mamba_split_conv1d_scan_combined(**given, chunk_size=16, seq_idx=numbers, headdim=P, ngroups=G)
    assert out.shape == (BATCH, 0, 5)
