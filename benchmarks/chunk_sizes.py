#!/usr/bin/env python3
"""Times `tfla bench` over chunk sizes and sets the cost model beside it; writes docs/benchmarks/chunk_sizes_cuda.json.

The model is the paper's (the sum of both times) with two rates fitted to the measurements: matrix operations and bytes
per second. What it gives as the best chunk size is what the plan's default should be on that device."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from paper.model import Workload, chunkwise
from program import Program, seconds

ROOT = Path(__file__).resolve().parent.parent
CHUNKS = (0, 64, 128, 256, 512, 1024, 2048, 4096)  # 0: the plan's default
# The paper's two workloads of 65,536 tokens.
WORKLOADS = (Workload(8, 8192, 16, 128, 256), Workload(8, 8192, 8, 256, 512))
QUICK_WORKLOADS = (Workload(1, 512, 2, 16, 32),)
STATE_BYTES = 2  # C and dC are stored in bfloat16 for 16-bit tensors

EXAMPLES = """examples:
  benchmarks/chunk_sizes.py --tfla build/cuda/tfla                 on the GPU of this machine
  benchmarks/chunk_sizes.py --device cpu --quick --out /tmp/chunks.json    to see that it works
"""


def device_name(device: str, report: dict[str, Any]) -> str:
    if device == "cpu":
        return str(report["cpu"])
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


def measure(program: Program, device: str, dtype: str, workloads: tuple[Workload, ...]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    rows = []
    for workload in workloads:
        for operation, passes in (("forward", ["forward"]), ("training", ["forward", "backward"])):
            flops, moved = chunkwise(program.path, workload, "exp", passes, STATE_BYTES)
            for asked in CHUNKS:
                print(f"chunk_sizes: {operation}, {workload}, chunk {asked}", file=sys.stderr, flush=True)
                options = ["--device", device, "--op", operation, "--dtype", dtype, "--shape", str(workload)]
                content = program.bench(*options, "--chunk", str(asked))
                report = report or {key: content[key] for key in ("tfla", "date", "cpu", "compiler")}
                (row,) = content["sequences"]
                chunk = row["plans"][-1]["chunk"]
                counts = {"flops": flops.total(workload, chunk), "bytes": moved.total(workload, chunk)}
                taken = {"chunk": chunk, "default": asked == 0, "seconds": seconds(row)}
                rows.append({"operation": operation} | asdict(workload) | taken | counts)
    return report | {"device": device, "name": device_name(device, report), "dtype": dtype, "rows": rows}


def add_fit(report: dict[str, Any]) -> None:
    """Rates with the least relative error, and with them the predicted times and the best chunk of each workload."""
    report["rates"] = {}
    for operation in ("forward", "training"):
        rows = [row for row in report["rows"] if row["operation"] == operation]
        costs = np.array([[row["flops"], row["bytes"]] for row in rows])
        times = np.array([row["seconds"] for row in rows])
        found, *_ = np.linalg.lstsq(costs / times[:, None], np.ones(len(rows)))
        report["rates"][operation] = {"seconds_per_flop": float(found[0]), "seconds_per_byte": float(found[1])}
        for row, cost in zip(rows, costs, strict=True):
            row["predicted"] = float(cost @ found)


def verdicts(report: dict[str, Any]) -> list[str]:
    """Where the plan's default stands among what was measured, and what the model would choose."""
    lines = []
    keys = [(row["operation"], row["dqk"], row["dhv"]) for row in report["rows"]]
    for key in dict.fromkeys(keys):
        rows = [row for row, own in zip(report["rows"], keys, strict=True) if own == key]
        best, model = (min(rows, key=lambda row: row[by]) for by in ("seconds", "predicted"))
        (own,) = (row for row in rows if row["default"])
        operation, dqk, dhv = key
        lines.append(
            f"{operation} {dqk}/{dhv}: best measured {best['chunk']}, best by the model {model['chunk']}, the plan's "
            f"{own['chunk']} is {own['seconds'] / best['seconds'] - 1:+.1%} from the best"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tfla", type=Path, default=ROOT / "build/release/tfla", help="the program (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small workload")
    parser.add_argument("--threads", type=int, default=0, help="cpu: threads (default: every core)")
    parser.add_argument("--out", type=Path, help="(docs/benchmarks/chunk_sizes_DEVICE.json)")
    arguments = parser.parse_args()
    if not arguments.tfla.is_file():
        parser.error(f"--tfla was {arguments.tfla}; build it first with make, or name the program")
    out = arguments.out or ROOT / f"docs/benchmarks/chunk_sizes_{arguments.device}.json"
    program = Program(arguments.tfla, arguments.threads, 0.01 if arguments.quick else 0.5)
    report = measure(program, arguments.device, arguments.dtype, QUICK_WORKLOADS if arguments.quick else WORKLOADS)
    add_fit(report)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join([*verdicts(report), f"written: {out}"]))


if __name__ == "__main__":
    main()
