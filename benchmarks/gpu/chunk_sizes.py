"""Times `tfla bench` over chunk sizes and sets the cost model beside it; writes docs/benchmarks/chunk_sizes_cuda.json.

The file is written after every point, and what it holds of other variants stays. fit_chunk_model.py, beside this
file, makes of it the constants from which the plan's default follows on a GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.program import Program
from benchmarks.gpu import fit_chunk_model
from benchmarks.paper.model import Polynomial, Workload, chunkwise

ROOT = Path(__file__).resolve().parents[2]
CHUNKS = (0, 64, 128, 256, 512, 1024, 2048, 4096)  # 0: the plan's default
OPERATIONS = {"forward": ["forward"], "training": ["forward", "backward"]}


@dataclass(frozen=True)
class Variant:
    device: str
    dtype: str
    portable: bool
    workloads: tuple[Workload, ...]

    @property
    def state_bytes(self) -> int:
        """C and dC are stored in bfloat16 for 16-bit tensors on a GPU."""
        return 2 if self.device == "cuda" and self.dtype == "bfloat16" else 4


# The paper's two workloads of 65,536 tokens, and as wide a model of small heads.
GPU = (Workload(8, 8192, 16, 128, 256), Workload(8, 8192, 8, 256, 512), Workload(4, 8192, 64, 64, 64))
FLOAT = tuple(Workload(one.batch // 4, one.tokens, one.heads, one.dqk, one.dhv) for one in GPU)
CPU = (Workload(1, 8192, 4, 128, 256), Workload(1, 8192, 4, 256, 512), Workload(1, 8192, 4, 64, 64))
QUICK = (Workload(1, 512, 2, 16, 32),)
VARIANTS = {
    "bfloat16": Variant("cuda", "bfloat16", False, GPU),  # the kernels that the plan takes
    "portable bfloat16": Variant("cuda", "bfloat16", True, GPU),
    "portable float32": Variant("cuda", "float32", True, FLOAT),
    "cpu float32": Variant("cpu", "float32", False, CPU),
}

EXAMPLES = """examples:
  python -m benchmarks.gpu.chunk_sizes --tfla build/cuda/tfla                               on the GPU of this machine
  python -m benchmarks.gpu.chunk_sizes --tfla build/cuda/tfla --variant "portable bfloat16" one variant
  python -m benchmarks.gpu.chunk_sizes --variant "cpu float32" --quick --out /tmp/chunks.json   to see that it works
"""


def points(variant: Variant, chunks: tuple[int, ...]) -> Iterator[tuple[Workload, str, int]]:
    """The default of portable kernels is one of the others, and follows from the measurement."""
    chunks = tuple(chunk for chunk in chunks if chunk > 0 or not variant.portable)
    for workload in variant.workloads:
        for operation in OPERATIONS:
            for chunk in chunks:
                yield workload, operation, chunk


def measured_seconds(row: dict[str, Any]) -> float:
    """After a rest where the device is a GPU, else call after call."""
    return float(row.get("burst_seconds", row["seconds"])["median"])


def measure(
    program: Program, name: str, variant: Variant, chunks: tuple[int, ...], keep: Callable[[dict, dict], None]
) -> None:
    """keep(report, row) after every point."""
    counts: dict[tuple[Workload, str], list[Polynomial]] = {}
    todo = list(points(variant, chunks))
    begin = time.monotonic()
    for number, (workload, operation, asked) in enumerate(todo, 1):
        where = f"{number} of {len(todo)}, {time.monotonic() - begin:3.0f} s"
        what = f"{name}, {operation}, {workload}, chunk {asked or 'default'}"
        print(f"chunk_sizes: {where}  {what}", file=sys.stderr, flush=True)
        if (workload, operation) not in counts:
            passes = OPERATIONS[operation]
            counts[workload, operation] = chunkwise(program.path, workload, "exp", passes, variant.state_bytes)
        flops, moved = counts[workload, operation]
        options = ["--device", variant.device, "--op", operation, "--dtype", variant.dtype, "--shape", str(workload)]
        options += ["--portable"] if variant.portable else []
        content = program.bench(*options, "--chunk", str(asked))
        (found,) = content["sequences"]
        chunk = found["plans"][-1]["chunk"]
        row = {"variant": name, "date": content["date"], "operation": operation} | asdict(workload)
        row |= {"chunk": chunk, "default": asked == 0, "seconds": measured_seconds(found)}
        row |= {"flops": flops.total(workload, chunk), "bytes": moved.total(workload, chunk)}
        keep(content, row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tfla", type=Path, default=ROOT / "build/release/tfla", help="the program (%(default)s)")
    parser.add_argument(
        "--variant",
        action="append",
        choices=VARIANTS,
        help="may be given several times; all must be of one device (default: those of a GPU)",
    )
    parser.add_argument("--chunk", type=int, action="append", help="a chunk size (default: the plan's, 64 to 4,096)")
    parser.add_argument("--min-time", type=float, default=0.05, help="seconds per timing (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small workload")
    parser.add_argument("--threads", type=int, default=0, help="cpu: threads (default: every core)")
    parser.add_argument("--out", type=Path, help="(docs/benchmarks/chunk_sizes_DEVICE.json)")
    given = parser.parse_args()
    names = given.variant or [name for name, one in VARIANTS.items() if one.device == "cuda"]
    devices = {VARIANTS[name].device for name in names}
    if len(devices) > 1:
        parser.error(f"--variant was {', '.join(names)}; they must be of one device")
    if not given.tfla.is_file():
        parser.error(f"--tfla was {given.tfla}; build it first with make, or name the program")
    out = given.out or ROOT / f"docs/benchmarks/chunk_sizes_{devices.pop()}.json"
    before = json.loads(out.read_text())["rows"] if out.is_file() else []
    rows = [row for row in before if row["variant"] not in names]
    report: dict[str, Any] = {}

    def keep(content: dict[str, Any], row: dict[str, Any]) -> None:
        rows.append(row)
        report.update({key: content[key] for key in ("tfla", "date", "cpu", "compiler")})
        report.update({"name": content.get("gpu", content["cpu"]), "rows": rows})
        fit_chunk_model.add_fit(report)
        out.write_text(json.dumps(report, indent=1) + "\n")

    for name in names:
        variant = VARIANTS[name]
        if given.quick:
            variant = Variant(variant.device, variant.dtype, variant.portable, QUICK)
        program = Program(given.tfla, given.threads, given.min_time)
        measure(program, name, variant, tuple(given.chunk or CHUNKS), keep)
    print(fit_chunk_model.comparison(report) + f"written: {out}")


if __name__ == "__main__":
    main()
