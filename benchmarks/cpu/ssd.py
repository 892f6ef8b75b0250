"""Times Mamba-2's state space dual on this CPU: tfla and what Hugging Face's Mamba-2 computes it by where it finds no
kernels. Writes docs/benchmarks/ssd_cpu.{json,md}.

Both sides begin with raw steps, and take turns in one process. Their results are compared before anything is timed.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from benchmarks.cpu import beside

EXAMPLES = """examples:
  PYTHONPATH=python python -m benchmarks.cpu.ssd --threads 2               measures, and writes both files
  PYTHONPATH=python python -m benchmarks.cpu.ssd --quick --out /tmp/bench  to see that it works
  python -m benchmarks.cpu.ssd --page                                      the page anew from the JSON file; no torch
"""
CHUNK = 256  # of theirs, the default of its config


@dataclass(frozen=True)
class Case:
    operation: str  # forward, training or step
    tokens: int
    batch: int = 1
    heads: int = 24
    head_dim: int = 64
    state: int = 128
    dtype: str = "float32"

    def __str__(self) -> str:
        tokens = "1 token" if self.operation == "step" else f"{self.tokens:,} tokens"
        heads = f"{self.heads} heads of {self.head_dim}, state {self.state}"
        return f"{self.operation}, {self.batch} x {tokens}, {heads}, {self.dtype}"


DTYPES = ("float32", "bfloat16")
CASES = (
    *(Case(operation, 2048, dtype=dtype) for dtype in DTYPES for operation in ("forward", "training")),
    *(Case("step", 1, batch, dtype=dtype) for dtype in DTYPES for batch in (1, 16)),
)
QUICK = (Case("forward", 300), Case("training", 300), Case("step", 1), Case("step", 1, 2, dtype="bfloat16"))

# ---------------------------------------------------------------- measuring


def drawn(case: Case) -> dict[str, Any]:
    """Arguments as the model's layer has them: decays exp(dt A) between 0.2 and nearly 1, one group."""
    import torch

    numbers = torch.Generator().manual_seed(1)
    dtype, rows = getattr(torch, case.dtype), (case.batch, case.tokens)

    def normal(*shape: int) -> Any:
        return torch.randn(*rows, *shape, generator=numbers).to(dtype)

    heads = torch.rand(2, case.heads, generator=numbers)
    given = {
        "x": normal(case.heads, case.head_dim), "dt": normal(case.heads), "A": -(1 + 15 * heads[0]),
        "B": normal(1, case.state), "C": normal(1, case.state), "D": torch.ones(case.heads),
        "dt_bias": -3 - 3 * heads[1],
    }  # fmt: skip
    return {name: x.requires_grad_(case.operation == "training") for name, x in given.items()}


def calls(case: Case) -> beside.Calls:
    return step_calls(case) if case.operation == "step" else sequence_calls(case)


def sequence_calls(case: Case) -> beside.Calls:
    import torch
    from transformers.models.mamba2 import modeling_mamba2 as peer

    import tfla

    given = drawn(case)
    chunkwise = inspect.unwrap(peer.mamba2_chunk_scan)  # not what stands there in its place where kernels are installed

    def theirs() -> Any:
        named = {"D": given["D"], "dt_bias": given["dt_bias"], "dt_softplus": True}
        return chunkwise(*(given[name] for name in ("x", "dt", "A", "B", "C")), chunk_size=CHUNK, **named)

    def ours() -> Any:
        return tfla.ssd(**given, dt_softplus=True)

    if case.operation == "forward":
        return {"transformers": torch.no_grad()(theirs), "tfla": torch.no_grad()(ours)}
    dy = torch.randn(given["x"].shape, generator=torch.Generator().manual_seed(2))

    def trained(function: Any) -> Any:
        y = function()  # float32 whatever the inputs are, with theirs
        return torch.autograd.grad(y, list(given.values()), dy.to(y.dtype))

    return {"transformers": lambda: trained(theirs), "tfla": lambda: trained(ours)}


def step_calls(case: Case) -> beside.Calls:
    """States of float32 with either dtype, updated in place by both: only the first call has the same on both sides."""
    import torch
    from transformers.models.mamba2 import modeling_mamba2 as peer

    import tfla

    given = {name: x if name in ("A", "D", "dt_bias") else x[:, 0] for name, x in drawn(case).items()}
    dims = (case.heads, case.head_dim, case.state)
    states = [torch.randn(case.batch, *dims, generator=torch.Generator().manual_seed(2)) for _ in beside.SIDES]
    token = inspect.unwrap(peer.mamba2_selective_state_update)
    # Views, as the model makes them.
    per_channel = {name: given[name][..., None].expand(*given[name].shape, dims[1]) for name in ("dt", "D", "dt_bias")}
    A = given["A"][:, None, None].expand(dims)

    def theirs() -> Any:
        named = {"dt_bias": per_channel["dt_bias"], "dt_softplus": True}
        y = token(states[0], given["x"], per_channel["dt"], A, given["B"], given["C"], per_channel["D"], **named)
        return y, states[0]

    def ours() -> Any:
        return tfla.ssd_step(**given, state=states[1], dt_softplus=True), states[1]

    return {"transformers": torch.no_grad()(theirs), "tfla": torch.no_grad()(ours)}


def bound(case: Case) -> float:
    """Theirs makes steps in the dtype of dt, whose rounding the decays of many tokens add up."""
    return 2.0**-5 if case.dtype == "bfloat16" else 1e-4


# ---------------------------------------------------------------- the page


def page(measured: dict[str, Any]) -> str:
    about = measured["about"]
    text = (
        f"{beside.about_line(about)} `tfla.ssd` and `tfla.ssd_step` beside the PyTorch code by which Mamba-2 of "
        f"transformers computes the same where it finds no kernels: `mamba2_chunk_scan` with chunks of {CHUNK}, and "
        "for a step `mamba2_selective_state_update`. Both begin with raw steps, have one group, and take turns in one "
        f"process; medians of {about['rounds']} rounds. Training is forward and all gradients. States are float32."
    )
    command = "`PYTHONPATH=python python -m benchmarks.cpu.ssd --threads 2`"
    end = f"{command} writes this page and [ssd_cpu.json](ssd_cpu.json).\n"
    title = "# The state space dual on a CPU\n"
    return "\n".join(
        [title, textwrap.fill(text, 130, break_on_hyphens=False) + "\n", beside.results(measured, Case), end]
    )


if __name__ == "__main__":
    beside.main("ssd_cpu", __doc__, EXAMPLES, CASES, QUICK, calls, bound, page)
