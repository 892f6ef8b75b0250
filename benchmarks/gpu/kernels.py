"""Times every kernel of tfla.mlstm alone on this machine's GPU; writes docs/benchmarks/kernels.{json,md}.

Forward and backward run under torch.profiler, and each launch is waited for (CUDA_LAUNCH_BLOCKING): otherwise a kernel
that may start early would be timed together with its wait for the one before it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.versions import versions
from benchmarks.gpu import parts as gpu_parts
from benchmarks.paper.model import Workload

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs/benchmarks"
PASSES = ("forward", "backward")
FEWEST = 20  # repetitions

EXAMPLES = """examples:
  PYTHONPATH=python python -m benchmarks.gpu.kernels     measures, and writes both files
  python -m benchmarks.gpu.kernels --page                the page anew from the JSON file; no GPU, no torch
"""


@dataclass(frozen=True)
class Case:
    workload: Workload
    documents: int = 0  # packed into one row, cut at random; 0: a dense batch

    def __str__(self) -> str:
        documents = f", {self.documents} packed documents" if self.documents else ""
        return gpu_parts.label(self.workload) + documents

    def boundaries(self) -> list[int]:
        tokens = self.workload.tokens
        cuts = random.Random(1).sample(range(1, tokens), self.documents - 1)
        return [0, *sorted(cuts), tokens]


CASES = (
    Case(Workload(8, 8192, 16, 128, 256)),
    Case(Workload(1, 65_536, 16, 128, 256)),
    Case(Workload(8, 8192, 8, 256, 512)),
    Case(Workload(8, 8192, 16, 64, 64)),
    Case(Workload(1, 65_536, 16, 128, 256), documents=32),
)

# ---------------------------------------------------------------- names

# Functions that are a part of what a row of src/plan/kernel_table.h makes. The others have the name of their row.
PART_OF = {
    "runs": "gates",
    "chunk_totals": "gates",
    "sequence_scan": "gates",
    "gate_vectors": "gates",
    "dq": "grad_qkv",
    "dk": "grad_qkv",
    "dv": "grad_qkv",
    "ones": "denominators",
    "grad_n_sums": "grad_n",
    "grad_n_scan": "grad_n",
    "step_scalars": "step",
    "step_state": "step",
    "step_tokens": "step_many",
    "step_strips": "step_many",
}
RENAMED = {"packed_segment_scan": "segment_scan", "step_cluster": "step", "start_states": "start_state"}


def _value(enumeration: str, name: str) -> int | None:
    """Of an enumeration among the template arguments; the name is as the compiler spells it, or as a reader does."""
    found = re.search(rf"{enumeration}(?:\)|E)(\d)", name)
    return int(found[1]) if found else None


def label(name: str) -> str | None:
    """The kernel's name in src/plan/kernel_table.h, with that of its part; None: no kernel of tfla."""
    found = re.search(r"([a-z][a-z_]*)_kernel(?![a-z_])", name)
    if "tfla" not in name or not found:
        return None
    function = found[1]
    if function in PART_OF:
        return f"{PART_OF[function]}: {function}"
    reverse = _value("Time", name) == 1
    if function == "packed_segment_scan":
        reverse = re.search(r"_kernel(?:ILb1E|<true>)", name) is not None
    if function == "grad_qk" and re.search(r"Options(?:ELb1E|\{true)", name):
        return "grad_qk_norm"
    if function == "outputs" and _value("Wanted", name) == 1:
        return "grad_denominators"
    if function == "forward":
        if re.search(r"DqkPart(?:\)0, true|E0ELb1E)", name):  # Options::grad_qk
            return "grad_k_reverse" if reverse else "grad_q_forward"
        return "forward" if not reverse else "grad_states_v" if _value("Keep", name) == 2 else "grad_v_reverse"
    function = RENAMED.get(function, function)
    if function == "states" and (_value("Pass", name) in (1, 2) if "sm90" in name else _value("Pass", name) == 0):
        function = "segment_totals"
    return f"grad_{function}" if reverse else function


# ---------------------------------------------------------------- measuring


def seconds_by_kernel(launches: Iterable[tuple[str, float]], repetitions: int) -> list[dict[str, Any]]:
    """Kernels in the order of their first launch, from (name, seconds) of all launches in their order. A kernel that a
    call launches several times counts once, with the sum."""
    times: dict[str, list[float]] = {}
    for name, seconds in launches:
        kernel = label(name)
        if kernel is not None:
            times.setdefault(kernel, []).append(seconds)
    if not times:
        raise SystemExit("kernels: torch.profiler saw no kernel of tfla; does another profiler hold the GPU?")
    rows = []
    for kernel, found in times.items():
        count, rest = divmod(len(found), repetitions)
        if rest:
            raise SystemExit(f"kernels: {kernel} was launched {len(found)} times in {repetitions} repetitions")
        sums = [sum(found[start : start + count]) for start in range(0, len(found), count)]
        rows.append({"kernel": kernel, "launches": count, "seconds": median(sums)})
    return rows


def profiled(call: Callable[[], object], repetitions: int) -> list[dict[str, Any]]:
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(repetitions):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return seconds_by_kernel(((event.name, event.time_range.elapsed_us() * 1e-6) for event in events), repetitions)


def measure(case: Case, repetitions: int) -> dict[str, Any]:
    import torch

    import tfla

    w = case.workload
    random_numbers = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, shift: float = 0) -> torch.Tensor:
        x = torch.randn(shape, generator=random_numbers, device="cuda", dtype=torch.float32) + shift
        return x.to(dtype).requires_grad_()

    q, k = (normal(w.batch, w.tokens, w.heads, w.dqk) for _ in range(2))
    v = normal(w.batch, w.tokens, w.heads, w.dhv)
    i = normal(w.batch, w.tokens, w.heads, dtype=torch.float32)
    f = normal(w.batch, w.tokens, w.heads, dtype=torch.float32, shift=3)
    dh = torch.randn_like(v)
    packing = {"cu_seqlens": torch.tensor(case.boundaries(), device="cuda")} if case.documents else {}
    inputs = (q, k, v, i, f)

    def forward() -> torch.Tensor:
        return tfla.mlstm(*inputs, **packing)

    found = {"workload": astuple(w), "documents": case.documents, "forward": profiled(forward, repetitions)}
    h = forward()
    found["backward"] = profiled(lambda: torch.autograd.grad(h, inputs, dh, retain_graph=True), repetitions)
    return found


def measure_all(repetitions: int) -> dict[str, Any]:
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when torch first asks for the GPU
    import torch

    import tfla

    if not torch.cuda.is_available():
        raise SystemExit("kernels: torch finds no GPU here; --page needs none")
    about = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "tfla": tfla.__version__,
        "python": platform.python_version(),
        "packages": versions("torch"),
        "repetitions": repetitions,
    }
    cases = []
    for case in CASES:
        print(f"kernels: {case}", file=sys.stderr, flush=True)
        cases.append(measure(case, repetitions))
    return {"about": about, "cases": cases}


# ---------------------------------------------------------------- the page


def section(found: dict[str, Any]) -> str:
    case = Case(Workload(*found["workload"]), found["documents"])
    lines = []
    for name in PASSES:
        rows = found[name]
        total = sum(row["seconds"] for row in rows)
        for row in rows:
            launches = f" ({row['launches']} launches)" if row["launches"] > 1 else ""
            share = f"{100 * row['seconds'] / total:.0f} %"
            lines.append([name, row["kernel"] + launches, f"{1e6 * row['seconds']:.1f}", share])
        lines.append([name, "**all**", f"{1e6 * total:.1f}", ""])
    return f"## {case}\n\n{table(['pass', 'kernel', 'us', 'of the pass'], lines)}"


def page(measured: dict[str, Any]) -> str:
    about = measured["about"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return "\n".join(
        [
            "# Kernels one by one\n",
            f"{about['gpu']}, {about['date']}; tfla {about['tfla']}, {packages}. Every kernel of `tfla.mlstm` and its\n"
            f"gradient: bfloat16, gates in float32, default options; medians of {about['repetitions']} calls under\n"
            "torch.profiler. Each launch is waited for, so kernels do not overlap: a call takes less than their sum.\n"
            "Names are those of [the kernel table](../../src/plan/kernel_table.h); after a colon, a part of one.\n"
            "`python -m benchmarks.gpu.kernels` writes this page and [kernels.json](kernels.json).\n",
            *(section(found) for found in measured["cases"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3 * FEWEST, help=f"{FEWEST} or more (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder (docs/benchmarks)")
    parser.add_argument("--page", action="store_true", help="only the page, from the folder's JSON file")
    given = parser.parse_args()
    if given.repetitions < FEWEST:
        parser.error(f"--repetitions was {given.repetitions}; it must be {FEWEST} or more")
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "kernels.json"
    if not given.page:
        file.write_text(json.dumps(measure_all(given.repetitions), indent=1) + "\n")
    (given.out / "kernels.md").write_text(page(json.loads(file.read_text())))
    print(f"written: {given.out}/kernels.md, kernels.json")


if __name__ == "__main__":
    main()
