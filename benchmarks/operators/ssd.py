"""Times Mamba-2's state space dual through PyTorch on this GPU: tfla.ssd, tfla.ssd_step, tfla.compat.fla and the layer
tfla.nn.Mamba2, beside mamba_ssm and flash-linear-attention. Writes ssd_gpu.{json,md}.

Peers come from the folder of --peers, which benchmarks/operators/peers_folder.py makes, or are installed. One that is
absent, fails or is wrong is shown with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators import beside
from benchmarks.operators.goals import COPY, MILLISECONDS, Goal, times
from benchmarks.operators.packages import mamba_ssm
from benchmarks.operators.problem import STATE, Call, Given, Problem

EXAMPLES = """examples:
  python -m benchmarks.operators.peers_folder --out peers                  once, where there is a network: 6 MB
  python -m benchmarks.operators.ssd --peers peers --out results           everything
  python -m benchmarks.operators.ssd --peers peers --out results --only step --rounds 1
  python -m benchmarks.operators.ssd --out results --page                  the page anew from the JSON file; no GPU
"""
CHUNK = 256  # of mamba_ssm: the default of its layer
BATCH, TOKENS = 4, 8192
PACKAGE = "mamba_ssm"
FLA = "fla"


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(dtype)


# ---------------------------------------------------------------- tfla.ssd and its step


@dataclass(frozen=True)
class Dual(Problem):
    operation: str
    heads: int
    head_dim: int
    state: int
    groups: int
    gated: bool = True  # D and z
    batch: int = BATCH
    tokens: int = TOKENS
    state_dtype: str = "float32"  # of a step's

    sides = ("tfla", PACKAGE)
    axes: ClassVar[dict[str, str]] = {
        "x": "BTHP", "dt": "BTH", "A": "H", "B": "BTGN", "C": "BTGN", "D": "H", "z": "BTHP", "dt_bias": "H",
        "y": "BTHP", STATE: "BHPN",
    }  # fmt: skip

    def __str__(self) -> str:
        heads = (
            f"{self.heads} heads of {self.head_dim}, state {self.state}, {self.groups} group{'s' * (self.groups > 1)}"
        )
        if self.operation == "step":
            return f"step, {self.batch} x 1 token, {heads}, states in {self.state_dtype}"
        return f"{self.operation}, {self.batch} x {self.tokens:,}, {heads}{', D and z' if self.gated else ''}"

    def draw(self, device: str) -> Given:
        """As the model's layer has them: decays exp(dt A) between 0.2 and nearly 1."""
        numbers = torch.Generator(device).manual_seed(1)
        rows = (self.batch,) if self.operation == "step" else (self.batch, self.tokens)
        rate, bias = torch.rand(2, self.heads, generator=numbers, device=device)
        given = {
            "x": normal(numbers, *rows, self.heads, self.head_dim), "dt": normal(numbers, *rows, self.heads),
            "A": -(1 + 15 * rate), "B": normal(numbers, *rows, self.groups, self.state),
            "C": normal(numbers, *rows, self.groups, self.state), "dt_bias": -3 - 3 * bias,
        }  # fmt: skip
        if self.gated:
            given["D"] = 1 + torch.rand(self.heads, generator=numbers, device=device)
            given["z"] = normal(numbers, *rows, self.heads, self.head_dim)
        if self.operation == "step":
            sizes = (self.batch, self.heads, self.head_dim, self.state)
            given[STATE] = normal(numbers, *sizes, dtype=getattr(torch, self.state_dtype))
        return given

    def narrow(self) -> dict[str, int]:
        return {"G": 1, "H": min(4, self.heads // self.groups)}

    def first_state(self, given: Given) -> Tensor:
        x, B = given["x"], given["B"]
        return x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])

    def token(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        x, B, C = given["x"], given["B"], given["C"]  # one group, whose heads the slice has
        dt = F.softplus(given["dt"] + given["dt_bias"])
        state = torch.exp(dt * given["A"])[..., None, None] * state + (dt[..., None] * x)[..., None] * B[:, :, None]
        y = (state * C[:, :, None]).sum(-1)
        if self.gated:
            y = (y + given["D"][:, None] * x) * F.silu(given["z"])
        return y, state

    def side(self, name: str, given: Given) -> Call:
        if self.operation == "step":
            return self._step(name, given)
        if name == "tfla":
            import tfla

            return lambda: tfla.ssd(**given, dt_softplus=True)
        scan = mamba_ssm("ops.triton.ssd_combined").mamba_chunk_scan_combined
        positional = [given[name] for name in ("x", "dt", "A", "B", "C")]
        named = {name: given.get(name) for name in ("D", "z", "dt_bias")}
        return lambda: scan(*positional, CHUNK, **named, dt_softplus=True)

    def _step(self, name: str, given: Given) -> Call:
        if name == "tfla":
            import tfla

            return lambda: tfla.ssd_step(**given, dt_softplus=True)
        update = mamba_ssm("ops.triton.selective_state_update").selective_state_update
        # Views, as its layer makes them.
        channels = {name: given[name][..., None].expand_as(given["x"]) for name in ("dt",)}
        channels |= {name: given[name][:, None].expand(self.heads, self.head_dim) for name in ("D", "dt_bias")}
        A = given["A"][:, None, None].expand(self.heads, self.head_dim, self.state)
        named = {"z": given["z"], "dt_bias": channels["dt_bias"], "dt_softplus": True}
        first = (given[STATE], given["x"], channels["dt"], A, given["B"], given["C"], channels["D"])
        return lambda: update(*first, **named)


# ---------------------------------------------------------------- tfla.compat.fla


@dataclass(frozen=True)
class Relative(Problem):
    """Simple GLA, whose decays are given, and Lightning attention, whose decays are its heads'."""

    operation: str
    function: str  # chunk_simple_gla or chunk_lightning_attn
    heads: int
    dim: int
    batch: int = BATCH
    tokens: int = TOKENS

    sides = ("tfla", FLA)
    axes: ClassVar[dict[str, str]] = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "g": "BTH", "y": "BTHV", STATE: "BHKV"}

    def __str__(self) -> str:
        return f"{self.operation}, {self.batch} x {self.tokens:,}, {self.function}, {self.heads} heads of {self.dim}"

    def draw(self, device: str) -> Given:
        numbers = torch.Generator(device).manual_seed(1)
        rows = (self.batch, self.tokens, self.heads)
        given = {name: normal(numbers, *rows, self.dim) for name in ("q", "k", "v")}
        if self.function == "chunk_simple_gla":
            given["g"] = F.logsigmoid(normal(numbers, *rows, dtype=torch.float32) + 4)
        return given

    def narrow(self) -> dict[str, int]:
        return {"H": min(4, self.heads)}

    def first_state(self, given: Given) -> Tensor:
        k, v = given["k"], given["v"]
        return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])

    def token(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = given["q"], given["k"], given["v"]
        # Layer 0 of 1 of Lightning attention: head h of H decays by exp(-8 h / H).
        slopes = -8 / self.heads * torch.arange(q.shape[1], device=q.device).to(q.dtype)
        decay = torch.exp(given.get("g", slopes.expand(q.shape[:2])))
        state = decay[..., None, None] * state + k[..., None] * v[:, :, None]
        return self.dim**-0.5 * (state * q[..., None]).sum(-2), state

    def side(self, name: str, given: Given) -> Call:
        if name == "tfla":
            from tfla.compat import fla as module
        else:
            from fla.ops import lightning_attn, simple_gla

            module = simple_gla if self.function == "chunk_simple_gla" else lightning_attn
        function = getattr(module, self.function)
        named = {"layer_idx": 0, "num_layers": 1} if self.function == "chunk_lightning_attn" else {}
        return lambda: function(**given, **named)[0]


# ---------------------------------------------------------------- what is measured

LARGE = Dual("forward", heads=128, head_dim=64, state=128, groups=8)  # Nemotron-H's layer
OF_2_7B = Dual("forward", heads=80, head_dim=64, state=128, groups=1)
GLA = Relative("forward", "chunk_simple_gla", heads=32, dim=128)
LIGHTNING = Relative("forward", "chunk_lightning_attn", heads=64, dim=128)


def both(problem: Any, forward: tuple[Goal, ...], training: tuple[Goal, ...]) -> list[beside.Case]:
    return [beside.Case(problem, forward), beside.Case(replace(problem, operation="training"), training)]


def within(forward: float, training: float) -> tuple[tuple[Goal, ...], tuple[Goal, ...]]:
    return (Goal(MILLISECONDS, forward),), (Goal(MILLISECONDS, training),)


def cases() -> list[beside.Case]:
    from benchmarks.operators.mamba2_layer import Layer

    found = [
        *both(LARGE, *within(1.1, 4.2)),
        *both(replace(LARGE, gated=False), *within(0.85, 3.2)),
        *both(OF_2_7B, *within(0.85, 3.0)),
    ]
    faster = (Goal(times(PACKAGE), 2.5),)
    found += both(replace(OF_2_7B, heads=64, head_dim=80), faster, faster)
    found += both(replace(OF_2_7B, state=64), faster, faster)
    faster = (Goal(times(FLA), 3.0),)
    found += both(GLA, (Goal(MILLISECONDS, 0.32), *faster), (Goal(MILLISECONDS, 1.30), *faster))
    found += both(LIGHTNING, faster, faster)
    found.append(beside.Case(Layer(), (Goal(times(PACKAGE), 2.0),)))
    for batch in (1, 128):
        for dtype in ("float32", "bfloat16"):
            step = replace(OF_2_7B, operation="step", batch=batch, state_dtype=dtype)
            found.append(beside.Case(step, (Goal(COPY, 0.9),)))
    return found


ABOUT = f"""`tfla.ssd` and `tfla.ssd_step` begin with raw steps, with a bias and softplus, as mamba_ssm's
`mamba_chunk_scan_combined` (chunks of {CHUNK}) and `selective_state_update` do. Simple GLA and Lightning attention are
those of `tfla.compat.fla` and of flash-linear-attention. The layer is `tfla.nn.Mamba2` beside `Mamba2` of mamba_ssm
with the same weights, of the shape of the model with 2.7 billion parameters; where there is no package causal_conv1d,
mamba_ssm's takes PyTorch's convolution."""

SUITE = beside.Suite("ssd_gpu", "The state space dual on a GPU", "benchmarks.operators.ssd", ABOUT, cases)

if __name__ == "__main__":
    beside.main(SUITE, __doc__, EXAMPLES)
