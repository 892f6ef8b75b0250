"""Regenerates every figure of the paper's appendices D, F and G from `tfla analyse`, and docs/paper.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.paper import counts, gains, machines, measured, page
from benchmarks.paper.data import Sheet, stored
from benchmarks.paper.model import Workload, analyse

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = """examples:
  python -m benchmarks.paper.make_paper                      docs/paper.md and its figures
  python -m benchmarks.paper.make_paper --out /tmp/paper     elsewhere, to look at
"""
# The paper's two workloads of 65,536 tokens, and what a GPU call stores: bfloat16 states, the exponential gate.
GPU_WORKLOADS = (Workload(8, 8192, 16, 128, 256), Workload(8, 8192, 8, 256, 512))
GPU_OPTIONS = ("--accelerator", "H200", "--state-bytes", "2")
SUBJECTS = ("flops", "bytes", "runtime", "intensity", "roofline", "chunk", "transfer")


class Progress:
    """One line on stderr per piece of work."""

    def __init__(self, total: int) -> None:
        self.begin = time.monotonic()
        self.total = total
        self.done = 0

    def __call__(self, what: str) -> None:
        self.done += 1
        seconds = time.monotonic() - self.begin
        print(f"make paper: {self.done:2} of {self.total}, {seconds:3.0f} s  {what}", file=sys.stderr, flush=True)


class Sheets:
    """The CSV files that the program left in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Sheet:
        return Sheet.read(self.folder / f"{name}.csv")


def figures(tfla: Path, sheets: Sheets, out: Path) -> list[tuple[str, Callable[[], None]]]:
    """What to draw, by name."""
    cpu = stored(ROOT / "docs/benchmarks/cpu_ranges.json")
    if cpu is None:
        raise SystemExit("make paper: docs/benchmarks/cpu_ranges.json is missing; benchmarks/cpu/ranges.py writes it")
    gpu = stored(ROOT / "docs/benchmarks/chunk_sizes_cuda.json")
    forward = measured.gpu(gpu, 256, 512, "forward", "bfloat16")
    found = (
        measured.gpu(gpu, *dims, "training", variant)
        for variant in ("bfloat16", "portable bfloat16", "portable float32")
        for dims in ((64, 64), (128, 256), (256, 512))
    )
    training = [one for one in found if one]
    machine = sheets["roofline_machines"]

    drawn = [
        ("transfer_gates", lambda: gains.both_gates(sheets["transfer"], out / "transfer_gates")),
        ("transfer_exp", lambda: gains.normalizers(sheets["transfer"], "exp", out / "transfer_exp")),
        ("transfer_sig", lambda: gains.normalizers(sheets["transfer"], "sig", out / "transfer_sig")),
        ("flops", lambda: counts.formulations(sheets["flops_curves"], out / "flops")),
        ("flop_optimal", lambda: counts.flop_optimal(sheets["chunk_flop_optimal"], out / "flop_optimal")),
        ("runtime", lambda: machines.runtime(sheets["runtime"], forward, out / "runtime")),
        ("intensity", lambda: machines.intensity(sheets["intensity"], machine, out / "intensity")),
        (
            "roofline",
            lambda: machines.roofline(
                sheets["roofline_points"], machine, forward, measured.cpu_tiles(tfla, cpu), out / "roofline"
            ),
        ),
        ("rates", lambda: machines.rates(sheets["runtime"], forward, out / "rates")),
        (
            "runtime_optimal",
            lambda: machines.over_head_dim(
                sheets["chunk_runtime_optimal"], sheets["chunk_flop_optimal"], out / "runtime_optimal"
            ),
        ),
        (
            "over_intensity",
            lambda: machines.over_intensity(sheets["chunk_over_intensity"], machine, out / "over_intensity"),
        ),
        ("chunk_sizes", lambda: machines.predicted(measured.cpu_chunks(cpu), out / "chunk_sizes")),
    ]
    if training:
        drawn.append(("chunk_sizes_gpu", lambda: machines.predicted(training, out / "chunk_sizes_gpu")))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tfla", type=Path, default=ROOT / "build/release/tfla", help="the program (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="where paper.md and paper/ go (%(default)s)")
    arguments = parser.parse_args()
    if not arguments.tfla.is_file():
        parser.error(f"--tfla was {arguments.tfla}; build it first with make, or name the program")
    folder = arguments.out / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        sheets = Sheets(Path(directory))
        say = Progress(len(SUBJECTS) + 13)
        for subject in SUBJECTS:
            say(f"tfla analyse {subject}")
            analyse(arguments.tfla, subject, Path(directory))
        for workload in GPU_WORKLOADS:
            folder_of = Path(directory) / f"{workload.dqk}_{workload.dhv}"
            for subject in ("runtime", "chunk"):
                gate = ("--gate", "exp") if subject == "runtime" else ()
                analyse(arguments.tfla, subject, folder_of, "--shape", str(workload), *GPU_OPTIONS, *gate)
        drawn = figures(arguments.tfla, sheets, folder)
        say.total = len(SUBJECTS) + len(drawn) + 1
        for name, draw in drawn:
            say(f"figure {name}")
            draw()
        say("docs/paper.md")
        (arguments.out / "paper.md").write_text(page.text(Path(directory), ROOT / "docs/benchmarks"))
    print(f"written: {arguments.out}/paper.md and the figures in {folder}")


if __name__ == "__main__":
    main()
