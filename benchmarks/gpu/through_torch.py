"""Times tfla.mlstm as PyTorch users call it, forward and training by autograd, for both values of `keep`.

Each time is the median of bursts, and a burst the median of a dozen calls after a rest (peers.py). The columns of a row
are taken in turn, so that a clock that drifts touches all of them alike. The file is written after every row.

    python -m benchmarks.gpu.through_torch                          on the GPU of this machine, some minutes
    python -m benchmarks.gpu.through_torch --only packed --rounds 1
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.versions import versions

ROOT = Path(__file__).resolve().parents[2]
GATES = ("exp", "sigmoid")
TOKENS = 65_536
COLUMNS = ("forward", "denominators", "states")  # the last two: training that keeps them


@dataclass(frozen=True)
class Case:
    batch: int
    tokens: int  # of a row
    heads: int
    dqk: int
    dhv: int
    lengths: tuple[int, ...] = ()  # of sequences packed into the row
    note: str = ""
    groups: int = 0  # query/key heads; 0: one for each head

    @property
    def name(self) -> str:
        packed = f" packed {self.note}" if self.lengths else ""
        grouped = f" with {self.groups} of q and k" if self.groups else ""
        return f"{self.batch} x {self.tokens:,}, {self.heads} heads of {self.dqk}/{self.dhv}{grouped}{packed}"


def uneven_lengths(total: int = TOKENS, shortest: int = 16, longest: int = 3000) -> tuple[int, ...]:
    """Drawn evenly from that range, the same in every run; the last one is what is left."""
    generator = random.Random(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > longest:
        lengths.append(min(generator.randint(shortest, longest), left - shortest))
    return (*lengths, left)


def packed(lengths: tuple[int, ...], note: str) -> Case:
    return Case(1, sum(lengths), 16, 128, 256, lengths, note)


CASES = (
    *(Case(TOKENS // tokens, tokens, 16, 128, 256) for tokens in (512, 2048, 8192, 32_768, 65_536)),
    Case(8, 8192, 8, 256, 512),
    Case(1, 65_536, 4, 128, 256),
    *(Case(4, 8192, 4096 // d, d, d) for d in (64, 128, 256, 512, 1024)),
    packed((32,) * 2048, "2,048 of 32 tokens"),
    packed((4,) * 16_384, "16,384 of 4 tokens"),
    packed(uneven_lengths(), "16 to 3,000"),
    Case(4, 8192, 128, 128, 64, groups=8),  # Mamba-2 of Nemotron-H
    Case(4, 8192, 80, 128, 64, groups=1),
)


def calls_of(case: Case, gate: str) -> dict[str, Callable[[], object]]:
    """The columns as calls, on inputs that stay."""
    import torch

    import tfla

    def tensor(*width: int, heads: int = 0, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        sizes = (case.batch, case.tokens, heads or case.heads, *width)
        return (torch.randn(*sizes, device="cuda") + mean).to(dtype).requires_grad_()

    inputs = [tensor(case.dqk, heads=case.groups), tensor(case.dqk, heads=case.groups), tensor(case.dhv)]
    inputs += [tensor(mean=-4, dtype=torch.float32), tensor(mean=4.5, dtype=torch.float32)]
    dh = tensor(case.dhv).detach()
    options: dict[str, Any] = {"gate": gate}
    if case.lengths:
        bounds = [0, *accumulate(case.lengths)]
        options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device="cuda")

    def forward() -> None:
        with torch.no_grad():
            tfla.mlstm(*inputs, **options)

    def training(keep: Any) -> None:
        for x in inputs:
            x.grad = None
        tfla.mlstm(*inputs, **options, keep=keep).backward(dh)

    return {"forward": forward, "denominators": lambda: training("denominators"), "states": lambda: training("states")}


def measure(case: Case, gate: str, rounds: int) -> dict[str, Any]:
    """A row: milliseconds of each column, bytes at the peak of each training, bytes that forward leaves."""
    import torch

    from benchmarks.gpu.peers import burst_seconds, warm_up
    from tfla import info

    calls = calls_of(case, gate)
    once = {name: warm_up(call) for name, call in calls.items()}
    bursts: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            bursts[name].append(burst_seconds(call, once[name]))
    row: dict[str, Any] = {"milliseconds": {name: 1e3 * median(times) for name, times in bursts.items()}}
    row["bursts_milliseconds"] = {name: [1e3 * seconds for seconds in times] for name, times in bursts.items()}
    row["peak_bytes"], row["saved_bytes"], row["kept"] = {}, {}, {}
    for name in COLUMNS[1:]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        calls[name]()
        torch.cuda.synchronize()
        row["peak_bytes"][name] = torch.cuda.max_memory_allocated()
        keep: Any = name
        plan = info.saved(
            batch=case.batch, tokens=case.tokens, heads=case.heads, dqk=case.dqk, dhv=case.dhv, keep=keep,
            sequences=len(case.lengths) or None,
        )  # fmt: skip
        row["saved_bytes"][name], row["kept"][name] = plan.bytes, plan.keep
    return row


def about(rounds: int) -> dict[str, Any]:
    import torch

    import tfla

    return {
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "dtype": "bfloat16",
        "rounds": rounds, "cuda": torch.version.cuda, "tfla": tfla.__version__, **versions("torch"),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| shape | gate | forward ms | training ms | keep states ms | less | kept GB | peak GB | keep states peak GB |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        head = f"| {row['name']} | {row['gate']} |"
        if "error" in row:
            lines.append(f"{head} {row['error']} |" + " |" * 6)
            continue
        times, peak, kept = row["milliseconds"], row["peak_bytes"], row["saved_bytes"]
        # Where the plan keeps denominators all the same, there is nothing to compare.
        same = row["kept"]["states"] != "states"
        gain = "-" if same else f"{100 * (1 - times['states'] / times['denominators']):.1f} %"
        states = "-" if same else f"{times['states']:.3f}"
        lines.append(
            f"{head} {times['forward']:.3f} | {times['denominators']:.3f} | {states} | {gain} "
            f"| {kept['states'] / 1e9:.3f} | {peak['denominators'] / 1e9:.2f} | {peak['states'] / 1e9:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "through_torch.json")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--gates", nargs="+", choices=GATES, default=GATES)
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each column")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("through_torch: torch finds no GPU")
    result: dict[str, Any] = {"about": about(arguments.rounds), "rows": []}
    for case in CASES:
        if arguments.only not in case.name:
            continue
        for gate in arguments.gates:
            row: dict[str, Any] = {"name": case.name, "gate": gate, "case": asdict(case)}
            try:
                row |= measure(case, gate, arguments.rounds)
            except RuntimeError as error:  # too little memory, a shape that no kernel takes: the others go on
                row["error"] = str(error).splitlines()[0]
            torch.cuda.empty_cache()
            result["rows"].append(row)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            print(table(result["rows"]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
