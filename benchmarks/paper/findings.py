"""Numbers for docs/paper.md, each computed from what `tfla analyse` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .data import Array, Sheet

EPSILONS = {"after_1e-2": "1e-2", "after_1e-6": "1e-6", "after_1e-8": "1e-8"}
DEFAULT = {"exp": "max(|S1| exp(-m))", "sig": "1"}


class Numbers:
    """The sheets of one run, and what to read from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sheet(self, name: str) -> Sheet:
        return Sheet.read(self.folder / f"{name}.csv")

    # ------------------------------------------------------------ counts

    def gate_percent(self, formulation: str, dim: int, column: str) -> str:
        values = self.sheet("flops_gates").where(formulation=formulation, **{"head dimension": dim}).column(column)
        low, high = values.min(), values.max()
        return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"

    def flops_at(self, chunk: int, formulation: str, dhv: int) -> float:
        """FLOPs of chunkwise at this chunk size over those of another formulation."""
        row = self.sheet("flops_curves").where(dhv=dhv, causal=0.5, chunk=chunk)
        return float(row.column("chunkwise")[0] / row.column(formulation)[0])

    def term(self, formulation: str, gate: str, name: str, column: str) -> float:
        terms = self.sheet("flops_terms").where(formulation=formulation, gate=gate, term=name, **{"pass": "forward"})
        return float(terms.column(column)[0])

    def total_ratio(self, subject: str, formulation: str, gate: str) -> float:
        """The paper's total over the exact one."""
        row = self.sheet(f"{subject}_totals").where(formulation=formulation, gate=gate, **{"pass": "forward"})
        return float(row.column("paper over exact")[0])

    # ------------------------------------------------------------ machines

    def best(self, machine: str, column: str = "runtime_optimal", which: str = "forward", gate: str = "sig") -> float:
        row = self.sheet("chunk_best").where(machine=machine, gate=gate, **{"pass": which})
        return float(row.column(column)[0])

    def slowdown(self, machine: str, chunk: int) -> float:
        """Time at a chunk size over the least time."""
        curve = self.sheet("runtime").where(accelerator=machine)
        return float(curve.where(chunk=chunk).column("sum_ms")[0] / curve.column("sum_ms").min())

    def span(self, machine: str) -> float:
        """Milliseconds between the slowest and the best chunk size from 16 to 8192."""
        times = self.sheet("runtime").where(accelerator=machine).column("sum_ms")
        return float(times.max() - times.min())

    # ------------------------------------------------------------ transfer behaviour

    def gains(self, gate: str, normalizer: str, column: str) -> tuple[Array, Array, Array]:
        part = self.sheet("transfer").where(gate=gate, normalizer=normalizer)
        return part.grid("forget_gate", "input_gate", column)

    def difference(self, a: tuple[str, str], b: tuple[str, str], column: str) -> float:
        """The largest difference of two gains over both gates."""
        return float(np.abs(self.gains(*a, column)[2] - self.gains(*b, column)[2]).max())

    def dependence(self, gate: str, normalizer: str, column: str) -> float:
        """How much the gain changes with the input gate, at most over forget gates."""
        gain = self.gains(gate, normalizer, column)[2]
        return float((gain.max(axis=0) - gain.min(axis=0)).max())

    def transition(self, gate: str, column: str, forget_gate: float) -> float:
        """The input gate at which half of the signal passes, by the default normalizer."""
        forget, inputs, gain = self.gains(gate, DEFAULT[gate], column)
        curve = gain[:, int(np.searchsorted(forget, forget_gate))]
        return float(np.interp(0.5, curve, inputs))


def within_best(rows: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Time at the plan's chunk size over the best measured one, for training."""
    found = {}
    for dims in dict.fromkeys((row["dqk"], row["dhv"]) for row in rows):
        part = [row for row in rows if (row["dqk"], row["dhv"]) == dims]
        times = [row["forward_seconds"] + row["backward_seconds"] for row in part]
        (own,) = (time for row, time in zip(part, times, strict=True) if row["default"])
        found[dims] = own / min(times)
    return found
