"""Times the gated delta rule on this CPU: tfla and what Hugging Face's Qwen3-Next computes it by where it finds no
kernels. Writes docs/benchmarks/delta_cpu.{json,md}.

Both sides normalise q and k themselves, and take turns in one process. Their results are compared before anything is
timed.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from benchmarks.cpu import beside

EXAMPLES = """examples:
  PYTHONPATH=python python -m benchmarks.cpu.delta                           measures, and writes both files
  PYTHONPATH=python python -m benchmarks.cpu.delta --quick --out /tmp/bench  to see that it works
  python -m benchmarks.cpu.delta --page                                      the page anew from the JSON file; no torch
"""


@dataclass(frozen=True)
class Case:
    operation: str  # forward, training or step
    tokens: int
    batch: int = 1
    heads: int = 4
    head_dim: int = 128
    dtype: str = "float32"

    def __str__(self) -> str:
        tokens = "1 token" if self.operation == "step" else f"{self.tokens:,} tokens"
        return f"{self.operation}, {self.batch} x {tokens}, {self.heads} heads of {self.head_dim}, {self.dtype}"


CASES = (
    Case("forward", 2048),
    Case("training", 2048),
    Case("forward", 2048, dtype="bfloat16"),
    Case("training", 2048, dtype="bfloat16"),
    Case("step", 1, heads=32),
    Case("step", 1, heads=32, batch=16),
)
QUICK = (Case("forward", 128), Case("training", 128), Case("step", 1))

# ---------------------------------------------------------------- measuring


def calls(case: Case) -> beside.Calls:
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    import tfla

    numbers = torch.Generator().manual_seed(1)
    training, dtype = case.operation == "training", getattr(torch, case.dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(case.batch, case.tokens, case.heads, *shape, generator=numbers)

    q, k, v = (normal(case.head_dim).to(dtype).requires_grad_(training) for _ in range(3))
    beta = torch.sigmoid(normal()).requires_grad_(training)
    g = torch.nn.functional.logsigmoid(normal() + 3).requires_grad_(training)
    state = torch.randn(case.batch, case.heads, case.head_dim, case.head_dim, generator=numbers)
    dh, inputs = torch.randn(v.shape, generator=numbers).to(dtype), (q, k, v, beta, g)
    # Not what stands there in its place where kernels are installed.
    chunkwise = inspect.unwrap(peer.torch_chunk_gated_delta_rule)
    token = inspect.unwrap(peer.torch_recurrent_gated_delta_rule)

    def theirs() -> Any:
        return chunkwise(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    def ours() -> Any:
        return tfla.delta_rule(q, k, v, beta, g, normalize_qk=True)

    def their_step() -> Any:
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return token(q, k, v, g=g, beta=beta, **options)

    pool = state.clone()

    def our_step() -> Any:
        """In place: the first call has the state that theirs has in every call."""
        return tfla.delta_rule_step(q, k, v, beta, g, pool, normalize_qk=True), pool

    if case.operation == "step":
        return {"transformers": torch.no_grad()(their_step), "tfla": torch.no_grad()(our_step)}
    if training:
        return {
            name: lambda function=function: torch.autograd.grad(function(), inputs, dh)
            for name, function in (("transformers", theirs), ("tfla", ours))
        }
    return {"transformers": torch.no_grad()(theirs), "tfla": torch.no_grad()(ours)}


def bound(case: Case) -> float:
    return 2.0**-7 if case.dtype == "bfloat16" else 1e-4


# ---------------------------------------------------------------- the page


def page(measured: dict[str, Any]) -> str:
    about = measured["about"]
    text = (
        f"{beside.about_line(about)} `tfla.delta_rule` and `tfla.delta_rule_step` beside the PyTorch code by which "
        "Qwen3-Next of transformers computes the same where it finds no kernels: `torch_chunk_gated_delta_rule`, and "
        "for a step `torch_recurrent_gated_delta_rule`. Both normalise q and k themselves and take turns in one "
        f"process; medians of {about['rounds']} rounds. Training is forward and all gradients."
    )
    command = "`PYTHONPATH=python python -m benchmarks.cpu.delta`"
    end = f"{command} writes this page and [delta_cpu.json](delta_cpu.json).\n"
    title = "# The gated delta rule on a CPU\n"
    return "\n".join(
        [title, textwrap.fill(text, 130, break_on_hyphens=False) + "\n", beside.results(measured, Case), end]
    )


if __name__ == "__main__":
    beside.main("delta_cpu", __doc__, EXAMPLES, CASES, QUICK, calls, bound, page)
