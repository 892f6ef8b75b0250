"""The cost model of the program, asked through `tfla analyse`."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .data import Sheet


@dataclass(frozen=True)
class Workload:
    batch: int
    tokens: int
    heads: int
    dqk: int
    dhv: int

    def __str__(self) -> str:
        return f"{self.batch},{self.tokens},{self.heads},{self.dqk},{self.dhv}"


@dataclass(frozen=True)
class Polynomial:
    """A count per head and chunk."""

    constant: float
    linear: float
    quadratic: float

    def total(self, workload: Workload, chunk: float) -> float:
        chunks = workload.batch * workload.heads * workload.tokens / chunk
        return chunks * (self.constant + chunk * (self.linear + chunk * self.quadratic))


def analyse(tfla: Path, subject: str, out: Path, *options: str) -> None:
    """Runs the program and leaves its CSV files in a folder."""
    command = [str(tfla), "analyse", subject, "--out", str(out), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")


def chunkwise(tfla: Path, workload: Workload, gate: str, passes: Iterable[str], state_bytes: int) -> list[Polynomial]:
    """FLOPs and bytes of the chunkwise formulation, passes added up."""
    counts = []
    with tempfile.TemporaryDirectory() as directory:
        for subject in ("flops", "bytes"):
            analyse(tfla, subject, Path(directory), "--shape", str(workload), "--state-bytes", str(state_bytes))
            terms = Sheet.read(Path(directory) / f"{subject}_terms.csv").where(formulation="chunkwise", gate=gate)
            parts = [terms.where(**{"pass": one}) for one in passes]
            sums = [sum(part.column(name).sum() for part in parts) for name in ("constant", "linear", "quadratic")]
            counts.append(Polynomial(*(float(value) for value in sums)))
    return counts
