"""tfla.nn: the layer against its formula, and its modes against each other."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inputs import make_state
from tfla import State
from tfla.nn import MLSTMCell, MLSTMLayer
from tfla.reference import recurrence, relative_error

DIM, HEADS = 24, 3


def make_layer(**options) -> MLSTMLayer:
    """With gates that depend on the input, unlike at the beginning of training."""
    layer = MLSTMLayer(DIM, HEADS, **options)
    with torch.no_grad():
        for gate in (layer.cell.input_gate, layer.cell.forget_gate):
            gate.weight.normal_()
        layer.cell.input_gate.bias.fill_(-1)
    return layer


def formula(layer: MLSTMLayer, x: torch.Tensor, norm) -> torch.Tensor:
    """The paper's appendix E.2, in float64."""
    weights = {name: value.double() for name, value in layer.state_dict().items()}
    x = x.double()
    q, k, v = (F.linear(x, weights[f"{name}.weight"]).unflatten(-1, (HEADS, -1)) for name in "qkv")
    i, f = (
        F.linear(x, weights[f"cell.{gate}.weight"], weights[f"cell.{gate}.bias"])
        for gate in ("input_gate", "forget_gate")
    )
    h, _ = recurrence(q, k, v, i, f, gate=layer.cell.gate, soft_cap=15.0)
    h = norm(h).flatten(-2) * weights["norm_weight"]
    return F.linear(torch.sigmoid(F.linear(x, weights["output_gate.weight"])) * h, weights["out.weight"])


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("layer", lambda h: (h - h.mean(-1, True)) / (h.var(-1, unbiased=False, keepdim=True) + 1e-2).sqrt()),
        ("rms", lambda h: h / (h.square().mean(-1, True) + 1e-2).sqrt()),
    ],
)
def test_layer_is_its_formula(name, norm, gate):
    layer, x = make_layer(norm=name, gate=gate, norm_eps=1e-2), torch.randn(2, 19, DIM)
    with torch.no_grad():
        layer.norm_weight.normal_()
        assert relative_error(layer(x), formula(layer, x, norm)) < 1e-5


def test_initial_gates_and_shapes():
    layer = MLSTMLayer(DIM, HEADS)
    assert (layer.heads, layer.dqk, layer.dhv) == (3, 4, 8)
    assert not layer.cell.input_gate.weight.any() and not layer.cell.forget_gate.weight.any()
    assert layer.cell.input_gate.bias.tolist() == [-10.0] * 3
    assert layer.cell.forget_gate.bias.tolist() == [3.0, 4.5, 6.0]
    with pytest.raises(ValueError, match="qk_factor makes 13"):
        MLSTMLayer(26, 2)
    with pytest.raises(ValueError, match="norm is 'batch'"):
        MLSTMLayer(DIM, HEADS, norm="batch")


def test_made_on_meta_and_filled_later():
    layer = MLSTMLayer(DIM, HEADS, device="meta").to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer.norm_weight.tolist() == [1.0] * DIM and layer.cell.input_gate.bias.tolist() == [-10.0] * HEADS
    assert layer(torch.randn(1, 5, DIM)).isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.3, "soft_cap": 1.0}, {"gate": "sigmoid", "normalizer": "max", "soft_cap": None}],
    ids=str,
)
def test_prefill_and_decode_continue_training(options):
    layer, x = make_layer(**options), torch.randn(2, 30, DIM)
    with torch.no_grad():
        whole = layer(x)
        first, state = layer.prefill(x[:, :11])
        second, state = layer.prefill(x[:, 11:17], state)
        third = torch.stack([layer.decode(x[:, t], state) for t in range(17, 25)], dim=1)
        fourth = layer.decode(x[:, 25:], state)
    assert relative_error(torch.cat([first, second, third, fourth], dim=1), whole) < 1e-5


def test_decode_in_slots():
    layer, x = make_layer(), torch.randn(2, DIM)
    pool, slots = layer.new_state(5), torch.tensor([3, 0])
    pool.copy_(State(*make_state(5, HEADS, layer.dqk, layer.dhv)))
    rows = pool.rows([3, 0])
    with torch.no_grad():
        y = layer.decode(x, pool, slots=slots)
        assert torch.equal(y, layer.decode(x, rows))
    assert torch.equal(pool.C[[3, 0]], rows.C)


def test_packed_documents_do_not_see_each_other():
    layer, x = make_layer(), torch.randn(1, 20, DIM)
    packed = layer(x, cu_seqlens=torch.tensor([0, 7, 20]))
    alone = torch.cat([layer(x[:, :7]), layer(x[:, 7:])], dim=1)
    assert relative_error(packed, alone) < 1e-6


# With the exponential gate eps is added in the scale of m, which at the start of a packed sequence is at least log f.
@pytest.mark.parametrize(("gate", "bound"), [("exp", 1e-6), ("sigmoid", 1e-12)])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_starts_reset_exactly_below_the_cap(gate, bound, soft_cap):
    layer = make_layer(gate=gate, soft_cap=soft_cap, dtype=torch.float64)
    x = torch.randn(2, 20, DIM, dtype=torch.float64)
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, 0] = starts[0, 7] = starts[1, 12] = True
    packed = layer(x.view(1, 40, DIM), cu_seqlens=torch.tensor([0, 7, 20, 32, 40])).view(2, 20, DIM)
    assert relative_error(layer(x, starts=starts), packed) < bound
    if (gate, soft_cap) == ("sigmoid", 2.0):
        layer.cell.reset = -25.0
        left = relative_error(layer(x, starts=starts), packed)
        assert 1e-12 < left < 1e-6  # of what came before, e^-25 times at most e^4 for gates between -2 and 2


def test_fused_projections_are_the_separate_ones():
    separate, fused, x = make_layer(), make_layer(fuse=True), torch.randn(2, 9, DIM)
    fused.load_state_dict(separate.state_dict())
    grads = []
    for layer in (separate, fused):
        y = layer(x)
        y.square().sum().backward()
        grads.append([y, *(parameter.grad for parameter in layer.parameters())])
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(*grads, strict=True))
    with pytest.raises(ValueError, match="fuse is given with bias"):
        MLSTMLayer(DIM, HEADS, fuse=True, bias=True)


class Adapted(nn.Module):
    """As adapters do: shows the weight of the layer it stands for, and adds something to what that makes."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias

    def forward(self, x):
        return self.layer(x) + 1


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", ["q", "output_gate", "cell.forget_gate"])
def test_replaced_and_hooked_parts_are_called(name, fuse):
    layer, x = make_layer(fuse=fuse), torch.randn(2, 9, DIM)
    part, seen = layer.get_submodule(name), []
    plain = layer(x)
    hook = part.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert relative_error(layer(x), plain) < 1e-5 and len(seen) == 1
    hook.remove()
    hook = part.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert relative_error(layer(x), plain) > 1e-3
    hook.remove()
    parent, _, own = name.rpartition(".")
    setattr(layer.get_submodule(parent), own, Adapted(part))
    changed = layer(x)
    assert relative_error(changed, plain) > 1e-3
    assert relative_error(layer.prefill(x)[0], changed) < 1e-5


def test_gates_as_configured():
    cell = MLSTMCell(
        DIM, HEADS, input_gate_bias=-2.0, forget_gate_bias=(1.0, 2.0), train_input_gate=False, track_gates=True
    )
    assert cell.input_gate.bias.tolist() == [-2.0] * 3 and cell.forget_gate.bias.tolist() == [1.0, 1.5, 2.0]
    assert not cell.input_gate.bias.requires_grad and cell.forget_gate.bias.requires_grad
    x, q, v = torch.randn(1, 5, DIM), torch.randn(1, 5, HEADS, 4), torch.randn(1, 5, HEADS, 8)
    cell(x, q, q, v)
    assert cell.input_gate_max.item() == pytest.approx(15 * math.tanh(-2 / 15))
    with pytest.raises(ValueError, match="takes no cu_seqlens, starts or group"), torch.no_grad():
        cell(x, q, q, v, cell(x, q, q, v, mode="prefill")[1], mode="decode", starts=torch.zeros(1, 5, dtype=torch.bool))


def test_master_weights_in_float32():
    layer, x = make_layer(), torch.randn(2, 9, DIM)
    y = layer(x.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and relative_error(y, layer(x)) < 0.05
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


def test_training_lowers_the_loss_and_decays_through_states():
    torch.manual_seed(0)
    layer, x = make_layer(), torch.randn(4, 32, DIM)
    target = torch.roll(x, 1, dims=1)  # yesterday's input: needs the state
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        # in two parts, with gradients through the state between them
        first, state = layer.prefill(x[:, :15])
        second, _ = layer.prefill(x[:, 15:], state)
        loss = F.mse_loss(torch.cat([first, second], dim=1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_gate_biases_exact(dtype):
    cell, x = MLSTMCell(DIM, HEADS), torch.randn(1, 5, DIM)
    with torch.no_grad():
        cell.input_gate.bias.fill_(-9.99)
    with torch.autocast("cpu", dtype=dtype):
        gate = cell.input_gate(x)
        y = make_layer()(x)
    assert gate.dtype == torch.float32 and torch.equal(gate, cell.input_gate.bias.expand(1, 5, HEADS))
    assert y.dtype == dtype and y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_whole_layer_in_a_dtype(dtype):
    layer, x = make_layer(dtype=dtype), torch.randn(2, 9, DIM, dtype=dtype)
    with torch.no_grad():
        y, state = layer.prefill(x)
        layer.decode(x[:, 0], state)
    assert y.dtype == dtype and state.C.dtype == layer.new_state(1).C.dtype


def test_compiled_layer():
    layer, x = make_layer(), torch.randn(2, 9, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), layer(x)) < 1e-6
    compiled(x).sum().backward()


def test_exported_layer():
    layer, x = make_layer(), torch.randn(2, 9, DIM)
    exported = torch.export.export(layer, (x,))
    assert torch.equal(exported.module()(x), layer(x))


def test_modes_are_checked():
    layer, x = make_layer(), torch.randn(1, 4, DIM)
    for arguments, sentence in (
        ({"mode": "eval"}, "mode is 'eval'"),
        ({"mode": "decode"}, "which needs state"),
        ({"mode": "prefill", "slots": torch.tensor([0])}, "only 'decode' takes slots"),
    ):
        with pytest.raises(ValueError, match=sentence):
            layer(x, **arguments)
