"""Times two builds of the program `tfla` on a GPU in turn and prints the ratio of every row.

A GPU changes its clock within seconds, and two of them differ by some percent: only what ran side by side is compared.
Each round has both builds on every row, in turn; a row's time is the median of the bursts of its rounds."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

EXAMPLES = """examples:
  python -m benchmarks.gpu.builds build/before/tfla build/cuda/tfla            what a change costs
  python -m benchmarks.gpu.builds old/tfla new/tfla --rounds 5 --most 1.02     fails where a row is 2 % slower
"""
# Name, operation, shape (B,T,H,dqk,dhv) and further options of `tfla bench`.
ROWS: list[tuple[str, list[str]]] = [
    *(
        (
            f"{operation} T {tokens} of 65536 tokens",
            ["--op", operation, "--shape", f"{65536 // tokens},{tokens},16,128,256"],
        )
        for tokens in (512, 2048, 8192, 32768, 65536)
        for operation in ("forward", "training")
    ),
    *(
        (f"{operation} {shape}", ["--op", operation, "--shape", shape])
        for shape in (
            "8,8192,8,256,512",
            "8,8192,16,64,64",
            "8,8192,16,128,128",
            "1,65536,4,128,256",
            "8,8192,8,512,512",
        )
        for operation in ("forward", "training")
    ),
    *(
        (f"{operation} float16", ["--op", operation, "--shape", "8,8192,16,128,256", "--dtype", "float16"])
        for operation in ("forward", "training")
    ),
    *(
        (
            f"{operation} portable {dtype}",
            ["--op", operation, "--shape", "4,8192,16,128,256", "--portable", "--dtype", dtype],
        )
        for dtype in ("bfloat16", "float32")
        for operation in ("forward", "training")
    ),
    *((f"step batch {batch}", ["--op", "step", "--shape", f"{batch},1,8,256,512"]) for batch in (1, 8, 64, 256)),
]


def times(program: Path, options: list[str]) -> dict[str, float]:
    """Seconds by gate; a step's under the name of its row."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(program), "bench", "--device", "cuda", "--formulation", "chunkwise", "--min-time", "0.05"]
        command += [] if "--dtype" in options else ["--dtype", "bfloat16"]
        subprocess.run([*command, "--json", str(report), *options], check=True, capture_output=True)
        found = json.loads(report.read_text())
    rows = found["sequences"] or found["steps"]
    return {row["gate"]: row.get("burst_seconds", row["seconds"])["median"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the program of one build")
    parser.add_argument("after", type=Path, help="and of the other")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both builds on every row (default 3)")
    parser.add_argument("--most", type=float, help="fail where after / before is larger than this in a row")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    arguments = parser.parse_args()
    slower = 0
    print(f"{'row':<40} {'gate':<5} {'before':>10} {'after':>10} {'ratio':>7}")
    for name, options in ROWS:
        if arguments.only not in name:
            continue
        taken: dict[str, tuple[list[float], list[float]]] = {}
        for _ in range(arguments.rounds):
            for side, program in enumerate((arguments.before, arguments.after)):
                for gate, seconds in times(program, options).items():
                    taken.setdefault(gate, ([], []))[side].append(seconds)
        for gate, (before, after) in taken.items():
            old, new = statistics.median(before), statistics.median(after)
            slower += arguments.most is not None and new > arguments.most * old
            print(f"{name:<40} {gate:<5} {1e3 * old:>10.4f} {1e3 * new:>10.4f} {new / old:>7.3f}", flush=True)
    if slower:
        raise SystemExit(f"tfla: {slower} rows are more than {arguments.most} times as slow")


if __name__ == "__main__":
    main()
