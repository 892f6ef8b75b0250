"""Times tfla, the published Triton kernels and cuDNN's attention side by side on this GPU; writes
docs/benchmarks/gpu.*."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import parts as gpu_parts

ROOT = Path(__file__).resolve().parents[2]
PEERS = (*gpu_parts.TRITON_PEERS, gpu_parts.ATTENTION, gpu_parts.STEP_PEER)

EXAMPLES = """parts:
{parts}

What it needs besides tfla is in benchmarks/gpu/requirements.txt; matplotlib only to draw.

examples:
  python -m benchmarks.gpu.compare --budget 900                    everything
  python -m benchmarks.gpu.compare --part lengths --tokens 8192    one length
  python -m benchmarks.gpu.compare --measure run.json              only measure: on a GPU machine without matplotlib
  python -m benchmarks.gpu.compare --draw run.json                 only write the page and the plots, without a GPU

In several runs, whose files are put together (where two hold the same case, the later file counts):
  python -m benchmarks.gpu.compare --part lengths --part memory --measure a.json
  python -m benchmarks.gpu.compare --part shapes --part sweep --measure b.json
  python -m benchmarks.gpu.compare --part attention --part step --measure c.json
  python -m benchmarks.gpu.compare --draw a.json b.json c.json
""".format(parts="\n".join(f"  {name:<11}{text}" for name, text in gpu_parts.PARTS.items()))


def merged(files: list[Path]) -> dict[str, Any]:
    """A case comes from one file as a whole: what is compared was measured in one run."""
    runs: list[dict[str, Any]] = []
    parts: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            content = json.loads(file.read_text())
            found = content.get("runs") or [content["about"]]
            for part in gpu_parts.PARTS:
                if part in content["parts"]:
                    parts.setdefault(part, {}).update(content["parts"][part])
            if len({run["gpu"] for run in runs + found}) > 1:
                raise SystemExit(f"compare: {file} is of another GPU than the files before it")
        except (OSError, ValueError, KeyError, AttributeError) as reason:
            raise SystemExit(f"compare: --draw was {file}, which is no file of --measure ({reason!r})") from None
        runs += found
    return {"runs": runs, "parts": {part: parts[part] for part in gpu_parts.PARTS if part in parts}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--program", type=Path, default=ROOT / "build/cuda/tfla", help="tfla, built with CUDA")
    parser.add_argument("--part", action="append", choices=gpu_parts.PARTS, help="a part to measure (default: all)")
    parser.add_argument(
        "--tokens", type=int, action="append", help="a sequence length of lengths and attention (default: all)"
    )
    parser.add_argument("--dim", type=int, action="append", help="a head dimension of sweep (default: all)")
    parser.add_argument("--min-time", type=float, default=0.2, help="seconds per timing call after call (%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds until a silent process is ended (%(default)s)"
    )
    parser.add_argument("--budget", type=float, default=250, help="seconds after which no case is begun (%(default)s)")
    parser.add_argument(
        "--compilers",
        type=int,
        default=4,
        help="processes of each Triton peer that compile first; 0: none (%(default)s)",
    )
    parser.add_argument(
        "--without", action="append", metavar="NAME", choices=PEERS, help="a peer to leave out: " + ", ".join(PEERS)
    )
    parser.add_argument(
        "--measure", type=Path, metavar="FILE", help="measure into FILE, written after every case, and stop there"
    )
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="draw these files instead of measuring")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks", help="where page, plots and data go")
    given = parser.parse_args()
    for dim in given.dim or []:
        if dim not in gpu_parts.SWEEP_DIMS:
            parser.error(f"--dim was {dim}; it must be one of {', '.join(map(str, gpu_parts.SWEEP_DIMS))}")
    for tokens in given.tokens or []:
        if tokens < 1 or gpu_parts.TOTAL_TOKENS % tokens != 0:
            parser.error(f"--tokens was {tokens}; it must divide {gpu_parts.TOTAL_TOKENS:,}")
    if given.draw is None and not given.program.exists():
        parser.error(f"--program was {given.program}, which does not exist; `make gpu-bundle` builds it")
    return given


def measure(given: argparse.Namespace, file: Path) -> None:
    from benchmarks.gpu.measure import Run

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("compare: ended; what was measured is in " + str(file)))
    file.parent.mkdir(parents=True, exist_ok=True)
    run = Run(
        program=given.program.resolve(),
        file=file,
        min_time=given.min_time,
        limit=given.limit,
        replicas=given.compilers,
        peers=[name for name in PEERS if name not in (given.without or [])],
        lengths=tuple(given.tokens) if given.tokens else None,
        dims=tuple(given.dim) if given.dim else None,
        budget=given.budget,
    )
    try:
        run.parts([part for part in gpu_parts.PARTS if part in (given.part or gpu_parts.PARTS)])
    except subprocess.SubprocessError as reason:
        raise SystemExit(f"compare: {reason}; {(getattr(reason, 'stderr', '') or '').strip()}") from None


def main() -> int:
    given = arguments()
    files = given.draw
    if files is None:
        files = [given.measure or ROOT / "build/compare.json"]
        measure(given, files[0])
    if given.measure is None or given.draw is not None:
        from benchmarks.gpu import page

        page.write(merged(files), given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
