#!/usr/bin/env python3
"""Times tfla and the published Triton kernels side by side on this GPU; writes docs/benchmarks/gpu.*."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOTAL_TOKENS = 65_536
LENGTHS = (512, 2048, 8192, 32_768, 65_536)
HEADS, DQK, DHV = 16, 128, 256
# Batch, tokens, heads, dqk, dhv; timed without peers.
OTHER_SHAPES = {
    "8 heads of 256/512, T 8,192": (8, 8192, 8, 256, 512),
    "4 heads of 128/256, T 65,536, batch 1": (1, 65_536, 4, 128, 256),
    "64 heads of 64/64, T 8,192, batch 4": (4, 8192, 64, 64, 64),
    "32 heads of 128/128, T 8,192, batch 4": (4, 8192, 32, 128, 128),
    "16 heads of 256/256, T 8,192, batch 4": (4, 8192, 16, 256, 256),
}

EXAMPLES = """What it needs besides tfla is in benchmarks/requirements-gpu.txt.

examples:
  benchmarks/compare.py                               everything, five minutes on an H200
  benchmarks/compare.py --tokens 8192 --min-time 0.1  one length, quickly
  benchmarks/compare.py --measure run.json            only measure: on a GPU machine without matplotlib
  benchmarks/compare.py --draw run.json               only write the page and the plot: on a machine without a GPU
"""


def say(what: str, begin: float = time.monotonic()) -> None:
    print(f"compare: {time.monotonic() - begin:5.0f} s  {what}", file=sys.stderr, flush=True)


def tfla_rows(program: Path, min_time: float, *options: str) -> dict[str, Any]:
    """One run of `tfla bench` on the GPU, as JSON."""
    out = ROOT / "build" / "compare-tfla.json"
    out.parent.mkdir(exist_ok=True)
    command = [str(program), "bench", "--device", "cuda", "--dtype", "bfloat16", "--formulation", "chunkwise"]
    command += ["--min-time", str(min_time), "--json", str(out), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads(out.read_text())


def tfla_sequences(program: Path, shape: tuple[int, ...], min_time: float) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for operation in ("forward", "training"):
        report = tfla_rows(program, min_time, "--op", operation, "--shape", ",".join(map(str, shape)))
        for row in report["sequences"]:
            entry = rows.setdefault(f"tfla mLSTM{row['gate']}", {})
            entry[operation] = row["burst_seconds"]["median"]
            entry[f"{operation}_sustained"] = row["seconds"]["median"]
            if operation == "training":
                entry["peak_bytes"] = row["tensor_bytes"] + row["scratch_bytes"]
    return rows


def measure(
    program: Path,
    lengths: tuple[int, ...],
    min_time: float,
    without: list[str],
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """keep(result) is called after every step of it, so that a run that is cut short is not lost."""
    import gpu_peers

    result: dict[str, Any] = {"about": gpu_peers.about(), "shape": [HEADS, DQK, DHV], "total_tokens": TOTAL_TOKENS}
    result["lengths"] = {}
    peers = [peer for peer in gpu_peers.sequence_peers() if peer.name not in without]
    for tokens in lengths:
        say(f"T {tokens}: tfla")
        rows = tfla_sequences(program, (TOTAL_TOKENS // tokens, tokens, HEADS, DQK, DHV), min_time)
        for peer in peers:
            say(f"T {tokens}: {peer.name}")
            rows[peer.name] = peer.time(TOTAL_TOKENS // tokens, tokens, HEADS, DQK, DHV, min_time)
        result["lengths"][str(tokens)] = rows
        keep(result)
    result["other_shapes"] = {}
    for name, shape in OTHER_SHAPES.items():
        say(f"{name}: tfla")
        result["other_shapes"][name] = tfla_sequences(program, shape, min_time)
        keep(result)
    say("step: tfla")
    report = tfla_rows(program, min_time, "--op", "step", "--gate", "exp")
    result["about"]["tfla"] = {key: report[key] for key in ("tfla", "date", "gpu")}
    result["steps"] = [
        {
            "batch": row["batch"],
            "seconds": row["seconds"]["median"],
            "bytes_per_second": row["state_bytes_per_second"],
            "copy_bytes_per_second": row["copy_bytes_per_second"],
        }
        for row in report["steps"]
    ]
    for row in result["steps"]:
        say(f"step: batch {row['batch']}, mlstm_kernels")
        row["peer_seconds"] = gpu_peers.time_step(row["batch"], min_time)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--program", type=Path, default=ROOT / "build/cuda/tfla", help="tfla, built with CUDA")
    parser.add_argument("--tokens", type=int, action="append", help="a sequence length (default: 512 to 65,536)")
    parser.add_argument("--min-time", type=float, default=0.3, help="seconds per timing")
    parser.add_argument(
        "--without", action="append", metavar="NAME", help="a peer to leave out, by its name in the table"
    )
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure into FILE and stop there")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw what FILE holds instead of measuring")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks", help="where page, plot and data go")
    given = parser.parse_args()
    if given.draw is not None:
        if not given.draw.is_file():
            parser.error(f"--draw was {given.draw}, which is not a file; --measure FILE makes one")
        measured = json.loads(given.draw.read_text())
    else:
        if not given.program.exists():
            parser.error(f"--program was {given.program}, which does not exist; `make gpu-bundle` builds it")
        partial = (given.measure or ROOT / "build/compare.json").with_suffix(".partial.json")
        partial.parent.mkdir(parents=True, exist_ok=True)
        measured = measure(
            given.program,
            tuple(given.tokens or LENGTHS),
            given.min_time,
            given.without or [],
            lambda result: partial.write_text(json.dumps(result, indent=1) + "\n"),
        )
        partial.unlink(missing_ok=True)
    if given.measure is not None:
        given.measure.write_text(json.dumps(measured, indent=1) + "\n")
        return 0
    import gpu_page

    gpu_page.write(measured, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
