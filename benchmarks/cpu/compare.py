"""Times tfla and the published mlstm_kernels side by side on this CPU; writes docs/benchmarks/cpu.{md,json,png,svg}."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.machine import busy_share
from benchmarks.common.program import Program, find, seconds
from benchmarks.common.verdict import as_json
from benchmarks.cpu import page, peer, targets
from benchmarks.cpu.peer import Setting, Shape

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(batch=1, tokens=0, heads=4, dqk=128, dhv=256)
STEP_SHAPE = Shape(batch=0, tokens=1, heads=8, dqk=256, dhv=512)
STEP_BATCHES = (1, 4, 16, 64)
COMPARE_TOKENS = (1024, 2048, 4096, 8192)
GROWTH_TOKENS = (2048, 4096, 8192, 16384, 32768, 65536)
GROWTH_TURNS = 3

# Seconds that a side is timed for before the other has its turn. A shared machine may change its speed by a factor of
# three from one second to the next: many short turns meet both of its moods on both sides, a few long ones do not.
TURN = 0.2

EXAMPLES = """examples:
  python -m benchmarks.cpu.compare                           everything, twenty to twenty-five minutes on two cores
  python -m benchmarks.cpu.compare --quick --out /tmp/bench  one short round, to see that it works
  python -m benchmarks.cpu.compare --rounds 9 --threads 1    more rounds, one thread on both sides
"""


@dataclass(frozen=True)
class Job:
    program: Program
    rounds: int
    compare_tokens: tuple[int, ...]
    growth_tokens: tuple[int, ...]
    growth_turns: int  # in a round


class Progress:
    """One line on stderr per piece of work."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def __call__(self, what: str) -> None:
        print(f"cpu.compare: {time.monotonic() - self.begin:5.0f} s  {what}", file=sys.stderr, flush=True)


def sized(shape: Shape, **changes: int) -> Shape:
    return Shape(**(asdict(shape) | changes))


def shape_text(shape: Shape) -> str:
    return f"{shape.batch},{shape.tokens},{shape.heads},{shape.dqk},{shape.dhv}"


def compare_cases(job: Job, say: Progress) -> list[dict[str, Any]]:
    """Every operation and length, with the peer's best setting there."""
    cases = []
    for operation in targets.OPERATIONS:
        for tokens in job.compare_tokens:
            say(f"looking for the best setting of mlstm_kernels: {operation}, T {tokens}")
            best = peer.best_setting(operation, sized(SHAPE, tokens=tokens), job.program.min_time / 4)
            cases.append({"operation": operation, "tokens": tokens, "setting": asdict(best), "rounds": []})
            cases[-1]["peer_setting"] = str(best)
    return cases


def compare_once(job: Job, case: dict[str, Any]) -> dict[str, float]:
    """The peer and then tfla on one case."""
    shape = sized(SHAPE, tokens=case["tokens"])
    setting = Setting(**case["setting"])
    peer_seconds = peer.sequence_seconds(case["operation"], shape, setting, job.program.min_time)
    options = ["--op", case["operation"], "--shape", shape_text(shape), "--dtype", "float32,bfloat16", "--gemm"]
    report = job.program.bench(*options)
    single = find(report["sequences"], dtype="float32")
    half = find(report["sequences"], dtype="bfloat16")
    return {
        "peer_seconds": peer_seconds,
        "tfla_seconds": seconds(single),
        "tfla_bfloat16_seconds": seconds(half),
        "tfla_flops": single["useful_flops_per_second"],
        "product_flops": report["product"]["flops_per_second"],
    }


def longest_call(job: Job, operation: str) -> float:
    """Seconds of one call on the longest sequence, while nothing disturbs it."""
    shape = sized(SHAPE, tokens=job.growth_tokens[-1])
    (row,) = job.program.bench("--op", operation, "--shape", shape_text(shape))["sequences"]
    return float(row["seconds"]["fastest"])


def growth_once(job: Job, operation: str, growth: dict[str, Any]) -> None:
    """One turn for all lengths. A sample of any of them is as long as a call on the longest."""
    tokens = ",".join(str(count) for count in job.growth_tokens)
    options = ["--op", operation, "--shape", shape_text(SHAPE), "--tokens", tokens]
    rows = job.program.bench(*options, "--sample-time", f"{growth['sample_seconds']:.3g}")["sequences"]
    growth["turns"].append({str(row["tokens"]): row["seconds"] for row in rows})
    growth["scratch_share"] = {str(row["tokens"]): row["scratch_bytes"] / row["tensor_bytes"] for row in rows}


def step_once(job: Job, batch: int) -> dict[str, float]:
    shape = sized(STEP_SHAPE, batch=batch)
    peer_seconds = peer.step_seconds(shape, job.program.min_time)
    row = find(job.program.bench("--op", "step", "--shape", shape_text(shape))["steps"], batch=batch)
    return {
        "peer_seconds": peer_seconds,
        "tfla_seconds": seconds(row),
        "state_rate": row["state_bytes_per_second"],
        "copy_rate": row["copy_bytes_per_second"],
    }


def about(job: Job) -> dict[str, Any]:
    """Where the numbers come from, and whether the machine was free for them."""
    busy_before = busy_share()
    report = job.program.bench("--op", "step", "--shape", "1,1,1,16,16", "--gemm")
    keys = ("tfla", "date", "cpu", "cores", "compiler", "threads")
    own = {key: report[key] for key in keys} | {"blas": report["product"]["blas"]}
    here = {"python": platform.python_version(), "rounds": job.rounds, "busy_before": busy_before}
    return own | peer.versions() | here


def measure(job: Job) -> dict[str, Any]:
    say = Progress()
    facts = about(job)
    cases = compare_cases(job, say)
    growth: dict[str, Any] = {
        operation: {"turns": [], "sample_seconds": longest_call(job, operation)} for operation in targets.OPERATIONS
    }
    steps: list[dict[str, Any]] = [{"batch": batch, "rounds": []} for batch in STEP_BATCHES]
    for number in range(1, job.rounds + 1):
        for case in cases:
            say(f"round {number} of {job.rounds}: {case['operation']}, T {case['tokens']}")
            case["rounds"].append(compare_once(job, case))
        for operation in targets.OPERATIONS:
            say(f"round {number} of {job.rounds}: growth with T, {operation}")
            for _ in range(job.growth_turns):
                growth_once(job, operation, growth[operation])
        for step in steps:
            say(f"round {number} of {job.rounds}: step, batch {step['batch']}")
            step["rounds"].append(step_once(job, step["batch"]))
    product = targets.over_rounds([row for case in cases for row in case["rounds"]], lambda row: row["product_flops"])
    return {
        "about": facts,
        "shape": asdict(SHAPE),
        "step_shape": asdict(STEP_SHAPE),
        "product_flops": product,
        "compare": cases,
        "growth": growth,
        "step": steps,
    }


def write(measured: dict[str, Any], out: Path) -> list[targets.Verdict]:
    verdicts = targets.judge(measured)
    measured["verdicts"] = as_json(verdicts)
    (out / "cpu.json").write_text(json.dumps(measured, indent=2) + "\n")
    (out / "cpu.md").write_text(page.page(measured, verdicts))
    page.plot(measured, out / "cpu")
    return verdicts


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"was {value}; it must be at least 1")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tfla", type=Path, default=ROOT / "build/release/tfla", help="the program (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks", help="where to write (%(default)s)")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="(default: every core)")
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved repetitions (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round on short sequences")
    arguments = parser.parse_args()
    if not arguments.tfla.is_file():
        parser.error(f"--tfla was {arguments.tfla}; build it first with make, or name the program")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    peer.set_threads(arguments.threads)
    job = Job(
        program=Program(arguments.tfla, arguments.threads, min_time=0.05 if arguments.quick else TURN),
        rounds=1 if arguments.quick else arguments.rounds,
        compare_tokens=targets.JUDGED_TOKENS[:1] if arguments.quick else COMPARE_TOKENS,
        growth_tokens=GROWTH_TOKENS[:2] if arguments.quick else GROWTH_TOKENS,
        growth_turns=1 if arguments.quick else GROWTH_TURNS,
    )
    for verdict in write(measure(job), arguments.out):
        print(f"{verdict.word:<6}  {verdict.what}: {verdict.measured} ({verdict.target})")
    print(f"written: {arguments.out}/cpu.md, cpu.json, cpu.png, cpu.svg")


if __name__ == "__main__":
    main()
