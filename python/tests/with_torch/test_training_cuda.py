"""Training on a GPU in bfloat16 goes as on the CPU in float32, step by step; skipped where test_cuda.py is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_cuda import usable
from tfla import info
from tfla.nn import MLSTMLayer

STEPS, BATCH, TOKENS, VOCABULARY = 200, 2, 256, 64
DIM, HEADS, LAYERS = 256, 2, 2
DQK, DHV = 64, 128


class Model(nn.Module):
    """Tokens to the next ones, by mLSTM layers in residual blocks. Weights are float32, and so is everything around
    the operator; `dtype` is that of its q, k and v."""

    def __init__(self, gate: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        # An input gate that takes up input from the first step on, or the operator would have no say in the loss.
        self.layers = nn.ModuleList(MLSTMLayer(DIM, HEADS, gate=gate, input_gate_bias=-1.0) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        for layer in self.layers:
            layer.cell.register_forward_pre_hook(lambda _, given: (given[0], *(x.to(dtype) for x in given[1:4])))
            layer.cell.register_forward_hook(lambda _, given, result: (result[0].to(given[0].dtype), result[1]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (DIM,)))
        return self.head(F.rms_norm(x, (DIM,)))


def losses(gate: str, device: str, dtype: torch.dtype) -> list[float]:
    """Of every step. What is drawn is drawn on the CPU, so it is the same on every device."""
    torch.manual_seed(1)
    model = Model(gate, dtype).to(device)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    curve = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve).tolist()


def on_hopper(operation: str) -> list[str]:
    """The kernels of sm_90a that a call launches."""
    shape = {"batch": BATCH, "tokens": TOKENS, "heads": HEADS, "dqk": DQK, "dhv": DHV}
    plan = info.describe(operation, **shape, dtype="bfloat16", device="cuda")
    lines = [line.removeprefix("kernels").split() for line in plan.splitlines() if "sm_90a" in line]
    return [line[0] for line in lines]


@pytest.mark.skipif(not usable(), reason="no GPU, or tfla or torch were built without CUDA")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_the_loss_is_that_of_the_cpu_at_every_step(gate):
    if torch.cuda.get_device_capability() == (9, 0):
        assert "forward" in on_hopper("forward")
        assert any(kernel.startswith(("grad_qk", "grad_qkv")) for kernel in on_hopper("backward"))
    expected = losses(gate, "cpu", torch.float32)
    assert expected[-1] < 0.9 * expected[0]  # it has learned something
    assert losses(gate, "cuda", torch.bfloat16) == pytest.approx(expected, rel=0.01)
