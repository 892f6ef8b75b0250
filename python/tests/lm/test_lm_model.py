"""tfla.lm's models: against their formula in float64, packed documents against separate ones, presets, recipe."""

import math

import pytest
import torch
import torch.nn.functional as F

from lm_inputs import EOD, small_model, small_recipe
from tfla.lm import Documents, LanguageModel, ModelConfig, preset, recipe
from tfla.lm.data import make_batch
from tfla.lm.models.init import small, wang
from tfla.lm.training import loss
from tfla.lm.training.metrics import flops_per_token
from tfla.lm.training.optimizer import decays, learning_rate, make_optimizer
from tfla.reference import recurrence, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
DECODE = ["xlstm", "deltanet"]
KINDS = ["xlstm", "transformer", "deltanet"]


def make_model(dtype=torch.float32, **changes) -> LanguageModel:
    """With gates that depend on the input, unlike at the beginning of training."""
    torch.manual_seed(0)
    model = LanguageModel(small_model(**changes), dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    return model


def packed_targets() -> torch.Tensor:
    """Two rows; documents of 5, 1, 30 tokens and one that goes to the end of its row; a short last row."""
    targets = torch.randint(0, EOD, (2, 48), generator=torch.Generator().manual_seed(1))
    targets[0, 4] = targets[0, 5] = targets[0, 35] = targets[1, 20] = EOD
    targets[1, 40:] = loss.IGNORED
    return targets


def rms(x, weight, eps):
    return x / (x.square().mean(-1, True) + eps).sqrt() * weight


def formula(model: LanguageModel, tokens: torch.Tensor, reset: float | None = None) -> torch.Tensor:
    """Logits of rows of one document by appendix E.2, in float64; or with a forget gate of `reset` where one begins."""
    config, w = model.config, {name: value.double() for name, value in model.state_dict().items()}
    x = w["embedding.weight"][tokens]
    for layer in range(config.layers):
        p = f"blocks.{layer}."
        y = rms(x, w[p + "norm_mix.weight"], config.norm_eps)

        def heads(name, y=y, p=p):
            return F.linear(y, w[f"{p}mix.{name}.weight"]).unflatten(-1, (config.heads, -1))

        i, f = (
            15 * torch.tanh(F.linear(y, w[f"{p}mix.cell.{g}.weight"], w[f"{p}mix.cell.{g}.bias"]) / 15)
            for g in ("input_gate", "forget_gate")
        )
        if reset is not None:
            f[tokens == EOD] = reset
        h, _ = recurrence(heads("q"), heads("k"), heads("v"), i, f, gate=config.gate, normalizer=config.normalizer)
        h = (h - h.mean(-1, True)) / (h.var(-1, unbiased=False, keepdim=True) + config.cell_norm_eps).sqrt()
        h = h.flatten(-2) * w[p + "mix.norm_weight"]
        x = x + F.linear(torch.sigmoid(heads("output_gate").flatten(-2)) * h, w[p + "mix.out.weight"])
        y = rms(x, w[p + "norm_ffn.weight"], config.norm_eps)
        gate, up = (F.linear(y, w[f"{p}ffn.{name}.weight"]) for name in ("gate", "up"))
        x = x + F.linear(gate * torch.sigmoid(gate) * up, w[p + "ffn.down.weight"])
    logits = F.linear(rms(x, w["norm.weight"], config.norm_eps), w["head.weight"])
    return 30 * torch.tanh(logits / 30)


@pytest.mark.parametrize("changes", [{}, {"gate": "sigmoid"}, {"gate": "sigmoid", "normalizer": "max"}, {"fuse": True}])
def test_model_is_its_formula(changes):
    model = make_model(**changes)
    tokens = torch.randint(0, EOD, (2, 37))
    with torch.no_grad():
        assert relative_error(model(tokens), formula(model, tokens)) < 1e-5


def test_soft_reset_is_its_formula():
    batch = make_batch(packed_targets()[:1], EOD)
    model = make_model(reset="soft")
    with torch.no_grad():
        actual = model(batch.inputs, documents=batch.documents)
    assert relative_error(actual, formula(model, batch.inputs, reset=-25.0)) < 1e-5


ARRANGED = [
    ({}, None, {"cu_seqlens"}),
    ({"reset": "soft"}, None, {"starts"}),
    ({}, "a group", {"starts", "group"}),
    ({"kind": "transformer"}, None, {"rotation", "documents"}),
    ({"kind": "deltanet"}, None, {"cu_seqlens"}),
]


@pytest.mark.parametrize(("changes", "group", "arguments"), ARRANGED, ids=str)
def test_how_documents_reach_the_layers(changes, group, arguments):
    """A soft reset and an exact one differ by less than rounding: only the way says which it was."""
    model, batch = make_model(**changes), make_batch(packed_targets(), EOD)
    tokens, options = model.kind.arrange(model.config, batch.inputs, batch.documents, model.dtype, group)
    assert options.keys() == arguments
    assert tokens.shape == ((1, 96) if "cu_seqlens" in arguments else (2, 48))
    if "starts" in arguments:
        assert model.blocks[0].mix.cell.reset == (-25.0 if changes else -math.inf)


@pytest.mark.parametrize("boundaries", [True, False], ids=["cu_seqlens", "starts"])
@pytest.mark.parametrize("changes", [{}, {"gate": "sigmoid"}, {"kind": "transformer"}, {"kind": "deltanet"}], ids=str)
def test_packed_documents_are_separate_ones(changes, boundaries):
    """Losses and gradients of packed rows are those of every document in a batch of its own."""
    model, batch = make_model(**changes), make_batch(packed_targets(), EOD)
    documents = batch.documents if boundaries else Documents(batch.documents.starts)
    total = model(batch.inputs, batch.targets, documents).total
    total.backward()
    grads = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    separate = torch.zeros(())
    lengths = []
    for row in range(2):
        begins = [*batch.documents.starts[row].nonzero()[:, 0].tolist(), 48]
        for begin, end in zip(begins, begins[1:], strict=False):
            one = model(batch.inputs[row : row + 1, begin:end], batch.targets[row : row + 1, begin:end]).total
            one.backward()
            separate = separate + one.detach()
            lengths.append(end - begin)
    assert lengths == [5, 1, 30, 12, 21, 27]
    assert relative_error(total, separate) < 1e-5
    for name, parameter in model.named_parameters():
        assert relative_error(grads[name], parameter.grad) < 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["checkpoint", "compile"])
def test_same_gradients_checkpointed_and_compiled(kind, way):
    batch = make_batch(packed_targets(), EOD)
    results = []
    for changed in (False, True):
        model = make_model(kind=kind)
        if changed and way == "checkpoint":
            model.checkpoint_activations = True
        elif changed:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        total = model(*batch).total
        total.backward()
        results.append((total, {name: x.grad for name, x in model.named_parameters()}, model.input_gate_max()))
    (total, grads, gate), (other, other_grads, other_gate) = results
    assert relative_error(other, total) < 1e-6
    assert all(relative_error(other_grads[name], grads[name]) < 1e-5 for name in grads)
    assert gate == other_gate or gate is other_gate is None


def test_bfloat16_computation_has_float32_parameters():
    batch, model, exact = make_batch(packed_targets(), EOD), make_model(torch.bfloat16), make_model()
    total = model(*batch).total
    total.backward()
    assert all(x.dtype == x.grad.dtype == torch.float32 for x in model.parameters())
    assert relative_error(total, exact(*batch).total) < 0.02
    assert {x.dtype for x in (model.blocks[0](torch.zeros(1, 3, 32, dtype=torch.bfloat16)),)} == {torch.bfloat16}


@pytest.mark.parametrize("kind", DECODE)
def test_matrices_in_dtype_change_nothing(kind):
    model, tokens = make_model(torch.bfloat16, kind=kind), torch.randint(0, EOD, (2, 9))
    with torch.no_grad():
        before = model(tokens), *model.prefill(tokens)[1][1]
        model.matrices_in_dtype()
        after = model(tokens), *model.prefill(tokens)[1][1]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    kept = {x.dtype for name, x in model.named_parameters() if x.dim() == 1}
    assert kept == {torch.float32} and model.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", DECODE)
def test_prefill_and_decode_are_the_whole_sequence(kind):
    model, tokens = make_model(kind=kind), torch.randint(0, EOD, (3, 20))
    with torch.no_grad():
        whole = model(tokens)
        logits, states = model.prefill(tokens[:, :11])
        rows = [logits] + [model.decode(tokens[:, t], states) for t in range(11, 20)]
    assert relative_error(torch.stack(rows, 1), whole[:, 10:]) < 1e-5


def test_input_gate_max():
    model, batch = make_model(), make_batch(packed_targets(), EOD)
    seen = []
    for block in model.blocks:
        block.mix.cell.register_forward_pre_hook(lambda cell, args: seen.append(cell.input_gate(args[0]).max().item()))
    model(*batch)
    assert model.input_gate_max().item() == pytest.approx(15 * math.tanh(max(seen) / 15), rel=1e-6)


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_loss_in_slices(monkeypatch, dtype, cap):
    monkeypatch.setattr(loss, "SLICE", 16)
    x, weight = (torch.randn(n, 24, dtype=torch.float64) for n in (53, 40))
    targets = torch.randint(0, 40, (53,))
    targets[[3, 50]] = loss.IGNORED
    x, weight = x.to(dtype), (3 * weight).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    results = []
    for ours in (True, False):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            total = loss.cross_entropy(a, b, targets, cap)
        else:
            logits = a.double() @ b.to(dtype).double().t()
            capped = logits if cap is None else cap * torch.tanh(logits / cap)
            total = F.cross_entropy(capped, targets, ignore_index=loss.IGNORED, reduction="sum")
        (total / 51).backward()
        results.append((total.detach(), a.grad, b.grad))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < bound
    each = loss.token_losses(x, weight, targets, cap)
    assert each.shape == (53,) and relative_error(each.sum(), results[1][0]) < bound
    assert each[3] == each[50] == 0


@pytest.mark.parametrize(
    ("name", "layers", "dim", "heads", "millions", "lr", "batch", "steps"),
    [
        ("160m", 12, 768, 6, 162.3, 3e-3, 128, 36000),
        ("400m", 24, 1024, 8, 407.1, 1e-3, 128, 46000),
        ("1.4b", 24, 2048, 8, 1421.2, 8e-4, 256, 31000),
        ("7b", 32, 4096, 8, 6865.4, None, None, None),
    ],
)
def test_presets(name, layers, dim, heads, millions, lr, batch, steps):
    config = preset(name)
    assert (config.layers, config.dim, config.heads) == (layers, dim, heads)
    with torch.device("meta"):
        model = LanguageModel(config)
        assert LanguageModel(preset(name, kind="transformer")).config.dim == dim
    count = sum(x.numel() for x in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.1)
    # Six operations per weight of a product; what is left is the mLSTM's own.
    mixing = flops_per_token(config, 8192) - 6 * (count - config.vocab * dim)
    assert 0.9 < mixing / (3 * layers * 4 * dim * (dim / 2) / heads) < 1.0
    if lr is None:
        with pytest.raises(ValueError, match="the paper trains no 7b; give lr, batch, steps"):
            recipe(name)
        return
    found = recipe(name)
    assert (found.lr, found.batch, found.steps, found.warmup, found.cooldown) == (lr, batch, steps, 750, 1000)
    assert (found.betas, found.adam_eps, found.weight_decay, found.clip) == ((0.9, 0.95), 1e-8, 0.1, 0.5)


REFUSED = [
    (ModelConfig, {"layers": 0}, "layers is 0; it must be positive"),
    (ModelConfig, {"gate": "log"}, "gate is 'log'; it must be 'exp' or 'sigmoid'"),
    (ModelConfig, {"gate": "soft"}, "gate is 'soft'; it must be 'exp' or 'sigmoid'"),
    (ModelConfig, {"norm_eps": "1e-6"}, "norm_eps is '1e-6'; it must be a number"),
    (ModelConfig, {"forget_gate_bias": 3.0}, "forget_gate_bias is 3.0; it must be 2 of a number"),
    (ModelConfig, {"ffn_dim": -1}, "ffn_dim is -1"),
    (ModelConfig, {"kind": "transformer", "heads": 5}, "heads is 5 for dim 32"),
    (type(small_recipe()), {"steps": 3}, "steps is 3; it must be at least warmup"),
    (type(small_recipe()), {"micro_batch": 0}, "micro_batch is 0"),
    (type(small_recipe()), {"context_parallel": 5}, "context is 48; it must be a multiple of context_parallel, 5"),
    (type(small_recipe()), {"dtype": "float16"}, "dtype is 'float16'"),
]


@pytest.mark.parametrize(("cls", "change", "sentence"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused(cls, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        (small_model if cls is ModelConfig else small_recipe)(**change)


def test_unknown_preset_and_field():
    with pytest.raises(ValueError, match="preset is '70b'"):
        preset("70b")
    with pytest.raises(ValueError, match="width is not a field of XLSTMConfig"):
        preset("tiny", width=3)


def test_initial_weights():
    torch.manual_seed(0)
    model = LanguageModel(preset("tiny", vocab=4096))
    block = model.blocks[0]
    expected = {
        model.embedding: small(128), model.head: small(128), block.mix.q: small(128), block.mix.v: small(128),
        block.ffn.gate: small(128), block.ffn.up: small(128), block.mix.out: wang(128, 4), block.ffn.down: wang(128, 4),
    }  # fmt: skip
    assert small(128) == pytest.approx(math.sqrt(2 / 640)) and wang(128, 4) == pytest.approx(2 / 4 / math.sqrt(128))
    for module, std in expected.items():
        # Five standard errors of a standard deviation.
        assert module.weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * module.weight.numel()))
    cell = block.mix.cell
    assert (
        not cell.input_gate.weight.any()
        and not cell.forget_gate.weight.any()
        and not block.mix.output_gate.weight.any()
    )
    assert cell.input_gate.bias.tolist() == [-10, -10] and cell.forget_gate.bias.tolist() == [3, 6]
    assert LanguageModel(preset("tiny", vocab=64, zero_output_gate=False)).blocks[0].mix.output_gate.weight.any()


@pytest.mark.parametrize(
    ("step", "part"),
    [(0, 0.0), (1, 1 / 750), (375, 0.5), (749, 749 / 750), (750, 1.0), ((750 + 35000) // 2, 0.55), (34999, 0.1),
     (35000, 0.1), (35500, 0.05), (35999, 0.0001), (36000, 0.0)],
)  # fmt: skip
def test_schedule(step, part):
    paper = recipe("160m")
    assert learning_rate(paper, step) == pytest.approx(3e-3 * part, rel=1e-4, abs=1e-12)


def test_weight_decay_is_for_linear_weights():
    model = make_model()
    decayed = {name for name, x in model.named_parameters() if decays(name, x)}
    assert {"head.weight", "blocks.0.mix.cell.input_gate.weight", "blocks.1.ffn.down.weight"} <= decayed
    assert not [name for name in decayed if "norm" in name or "bias" in name or "embedding" in name]
    optimizer = make_optimizer(model, small_recipe())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_fixed_input_gate_is_not_trained():
    model, batch = make_model(train_input_gate=False), make_batch(packed_targets(), EOD)
    model(*batch).total.backward()
    optimizer = make_optimizer(model, small_recipe())
    before = model.blocks[0].mix.cell.input_gate.bias.clone()
    optimizer.step()
    assert torch.equal(model.blocks[0].mix.cell.input_gate.bias, before)
    assert model.blocks[0].mix.cell.input_gate.bias.grad is None
