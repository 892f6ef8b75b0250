"""Times the gated delta rule through PyTorch on this GPU: tfla.delta_rule and tfla.delta_rule_step, beside
flash-linear-attention, FlashInfer and FlashQLA. Writes delta_gpu.{json,md}.

Peers come from the folder of --peers, which benchmarks/operators/peers_folder.py makes, or are installed. One that is
absent, fails or is wrong is shown with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators import beside
from benchmarks.operators.goals import AHEAD, COPY, MICROSECONDS, MILLISECONDS, Goal, the_time_of
from benchmarks.operators.problem import STATE, Call, Given, Problem

EXAMPLES = """examples:
  python -m benchmarks.operators.peers_folder --out peers                  once, where there is a network: 6 MB
  python -m benchmarks.operators.delta --peers peers --out results         everything
  python -m benchmarks.operators.delta --peers peers --out results --only step --rounds 1
  python -m benchmarks.operators.delta --out results --page                the page anew from the JSON file; no GPU
"""
FLA, FLASHINFER, FLASHQLA = "fla", "flashinfer", "flash_qla"
NORMALIZED = {"use_qk_l2norm_in_kernel": True}


@dataclass(frozen=True)
class Rule(Problem):
    operation: str
    heads: int = 32
    qk_heads: int = 16
    dqk: int = 128
    dhv: int = 128
    batch: int = 4
    tokens: int = 8192

    axes: ClassVar[dict[str, str]] = {
        "q": "BTGK", "k": "BTGK", "v": "BTHV", "beta": "BTH", "g": "BTH", "y": "BTHV", STATE: "BHKV",
    }  # fmt: skip

    def __str__(self) -> str:
        heads = f"{self.heads} heads of {self.dqk}/{self.dhv}"
        heads += f", {self.qk_heads} of q and k" if self.qk_heads != self.heads else ""
        return (
            f"{self.operation}, {self.batch} x {'1 token' if self.operation == 'step' else f'{self.tokens:,}'}, {heads}"
        )

    @property
    def sides(self) -> tuple[str, ...]:  # type: ignore[override]
        """FlashInfer has no gradients, FlashQLA no steps, and both have square states."""
        square = self.dqk == self.dhv
        inference = (FLASHINFER,) if self.operation != "training" and square else ()
        return ("tfla", FLA, *inference, *((FLASHQLA,) if self.operation != "step" and square else ()))

    def draw(self, device: str) -> Given:
        numbers = torch.Generator(device).manual_seed(1)
        rows = (self.batch,) if self.operation == "step" else (self.batch, self.tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=numbers, device=device)

        given = {
            "q": normal(*rows, self.qk_heads, self.dqk).bfloat16(),
            "k": normal(*rows, self.qk_heads, self.dqk).bfloat16(),
            "v": normal(*rows, self.heads, self.dhv).bfloat16(),
            "beta": torch.sigmoid(normal(*rows, self.heads)),
            "g": F.logsigmoid(normal(*rows, self.heads) + 3),
        }
        if self.operation == "step":
            given[STATE] = normal(self.batch, self.heads, self.dqk, self.dhv)
        return given

    def narrow(self) -> dict[str, int]:
        return {"G": 1, "H": self.heads // self.qk_heads}

    def first_state(self, given: Given) -> Tensor:
        k, v = given["k"], given["v"]
        return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])

    def token(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (given["q"], given["k"]))
        state = torch.exp(given["g"])[..., None, None] * state  # the slice has one head of q and k
        rest = given["v"] - (state * k[..., None]).sum(-2)
        state = state + (given["beta"][..., None] * k)[..., None] * rest[:, :, None]
        return self.dqk**-0.5 * (state * q[..., None]).sum(-2), state

    def side(self, name: str, given: Given) -> Call:
        return (STEPS if self.operation == "step" else SEQUENCES)[name](given)


# ---------------------------------------------------------------- who computes it


def tfla_sequence(given: Given) -> Call:
    import tfla

    return lambda: tfla.delta_rule(**given, normalize_qk=True)


def fla_sequence(given: Given) -> Call:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda: chunk_gated_delta_rule(**given, **NORMALIZED)[0]


def flashqla_sequence(given: Given) -> Call:
    from flash_qla import chunk_gated_delta_rule

    return lambda: chunk_gated_delta_rule(**given, **NORMALIZED)[0]


def flashinfer_sequence(given: Given) -> Call:
    """Of packed rows, with decays instead of their logarithms, which are made before."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    batch, tokens, heads, dim = given["v"].shape
    bounds = tokens * torch.arange(batch + 1, device=given["v"].device)
    packed = {name: x.detach().flatten(0, 1) for name, x in given.items()}
    packed["g"] = packed["g"].exp()
    return lambda: chunk_gated_delta_rule(**packed, cu_seqlens=bounds, **NORMALIZED).view(batch, tokens, heads, dim)


def tfla_step(given: Given) -> Call:
    import tfla

    return lambda: tfla.delta_rule_step(**given, normalize_qk=True)


def with_tokens(given: Given) -> Given:
    return {name: x if name == STATE else x.unsqueeze(1) for name, x in given.items()}


def fla_step(given: Given) -> Call:
    """It makes a new state, and is called here with the old one's memory: the copy back is not timed, but for the one
    call whose results are looked at."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    token = with_tokens(given)
    state = token.pop(STATE)
    checked: list[Tensor] = []

    def call() -> Tensor:
        y, after = fused_recurrent_gated_delta_rule(**token, initial_state=state, output_final_state=True, **NORMALIZED)
        if not checked:
            checked.append(state.copy_(after))
        return y[:, 0]

    return call


def flashinfer_step(given: Given) -> Call:
    """From raw gates: A_log, dt_bias and pre-activations that make the same ones."""
    from flashinfer.gdn_decode import gated_delta_rule_decode

    token = with_tokens(given)
    heads = given["v"].shape[1]
    log = torch.zeros(heads, device=given["v"].device)
    decay = -token["g"].float()  # softplus of a, where exp(A_log) is 1
    raw = {
        "A_log": log, "dt_bias": log, "a": (decay + torch.log(-torch.expm1(-decay))).bfloat16(),
        "b": torch.logit(token["beta"].float()).bfloat16(),
    }  # fmt: skip
    inputs = {name: token[name] for name in ("q", "k", "v", STATE)}
    return lambda: gated_delta_rule_decode(**inputs, **raw, use_qk_l2norm=True)[0][:, 0]


SEQUENCES: dict[str, Callable[[Given], Call]] = {
    "tfla": tfla_sequence, FLA: fla_sequence, FLASHINFER: flashinfer_sequence, FLASHQLA: flashqla_sequence,
}  # fmt: skip
STEPS: dict[str, Callable[[Given], Call]] = {"tfla": tfla_step, FLA: fla_step, FLASHINFER: flashinfer_step}


# ---------------------------------------------------------------- what is measured

MAIN = Rule("forward")
MANY, ONE = replace(MAIN, batch=8), replace(MAIN, batch=1, tokens=65_536)
TARGETS_MS = {"forward": (0.42, 0.34), "training": (2.0, 1.5)}  # and the goals behind them
AS_LONG = 1.4


def cases() -> list[beside.Case]:
    found = []
    for operation, (target, goal) in TARGETS_MS.items():
        goals = (Goal(MILLISECONDS, target), Goal(MILLISECONDS, goal, "the goal"))
        found.append(beside.Case(replace(MAIN, operation=operation), goals))
    for operation in TARGETS_MS:
        many = replace(MANY, operation=operation)
        found.append(beside.Case(many))
        found.append(beside.Case(replace(ONE, operation=operation), (Goal(the_time_of(str(many)), AS_LONG),)))
    for dqk in (128, 256):
        wide: Any = replace(MAIN, heads=16, dqk=dqk, dhv=256)
        found += [beside.Case(replace(wide, operation=operation), (Goal(AHEAD, 1.0),)) for operation in TARGETS_MS]
    for batch in (1, 16, 64, 256):
        goals = (Goal(COPY, 0.9), *((Goal(MICROSECONDS, 6.0),) if batch == 1 else ()))
        found.append(beside.Case(replace(MAIN, operation="step", batch=batch), goals))
    return found


ABOUT = """`tfla.delta_rule` and `tfla.delta_rule_step` beside `chunk_gated_delta_rule` and
`fused_recurrent_gated_delta_rule` of flash-linear-attention, FlashInfer's `chunk_gated_delta_rule` and
`gated_delta_rule_decode`, and FlashQLA's `chunk_gated_delta_rule`. All normalise q and k themselves. beta is in [0,1],
the decay a logsigmoid, both float32; states are float32."""

SUITE = beside.Suite("delta_gpu", "The gated delta rule on a GPU", "benchmarks.operators.delta", ABOUT, cases)

if __name__ == "__main__":
    beside.main(SUITE, __doc__, EXAMPLES)
