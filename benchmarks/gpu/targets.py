"""The targets of the CUDA backend on an H200, and whether a set of measurements meets them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.common.verdict import Verdict, at_most, failed
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu.parts import own
from benchmarks.gpu.peer_process import TOO_LATE
from benchmarks.paper.model import Workload

Parts = dict[str, dict[str, Any]]
Row = dict[str, Any]
OPERATIONS = ("forward", "training")
GATES = ("exp", "sig")

# ms, up to a sequence length.
LENGTHS_MS = {
    "forward": {8192: 0.52, 32_768: 0.65, 65_536: 0.80},
    "training": {8192: 2.3, 32_768: 2.6, 65_536: 2.9},
}
SHAPES_MS = {
    gpu_parts.WIDE: {"forward": 0.95, "training": 3.6},
    gpu_parts.STARVED: {"forward": 0.30, "training": 0.90},
}
GATE_RATIO = 1.05  # mLSTMexp over mLSTMsig
PEAK_GB = {0: 4.4, 1024: 3.7}  # by chunk, 0 being the default
PORTABLE_MS = {"forward": 3.5, "training": 9.5}  # at every sequence length
PORTABLE_PEAK_GB = 4.4  # at the default chunk; at larger ones less than there
FASTER_DIMS = (64, 128, 256)  # than every peer; at the other dimensions of the sweep no slower
FASTER_THAN_ATTENTION = {"forward": 2048, "training": 1024}  # from this length on
STEP_MICROSECONDS = {1: 5.0}
STEP_TERABYTES = {64: 3.9, 256: 3.9}


def of_every_length(verdict: Verdict, measured: Iterable[int]) -> Verdict:
    """Open where it would be met but for lengths that were not measured."""
    wanting = verdict.met and not set(gpu_parts.LENGTHS) <= set(measured)
    return replace(verdict, met=False, open=True) if wanting else verdict


def cases(parts: Parts, part: str) -> Iterator[tuple[Workload, dict[str, Row]]]:
    for case in parts.get(part, {}).values():
        yield Workload(*case["workload"]), case["rows"]


def judge_lengths(parts: Parts, gate: str) -> Iterator[Verdict]:
    for operation, targets in LENGTHS_MS.items():
        shortest = 0
        for longest, target in targets.items():
            rows = [rows[own(gate)] for work, rows in cases(parts, "lengths") if shortest < work.tokens <= longest]
            shortest = longest
            what = f"mLSTM{gate}: {operation}, T up to {longest:,}"
            if any(operation not in row for row in rows):
                yield failed(what, f"at most {target:g} ms")
            elif rows:
                yield at_most(what, target, 1e3 * max(row[operation] for row in rows), "ms")


def judge_portable_lengths(parts: Parts, gate: str) -> Iterator[Verdict]:
    """By the longest time of any length, and by the length where tfla leads mlstm_kernels least."""
    name, peer = own(gate, portable=True), f"mlstm_kernels mLSTM{gate}"
    found = {work.tokens: rows for work, rows in cases(parts, "lengths") if name in rows}
    for operation, target in PORTABLE_MS.items():
        what, ahead = f"portable kernels, mLSTM{gate}: {operation}, each T", "faster than mlstm_kernels"
        if any(operation not in rows[name] for rows in found.values()):
            yield failed(what, f"at most {target:g} ms")
            yield failed(what, ahead)
            continue
        times = {tokens: rows[name][operation] for tokens, rows in found.items()}
        if times:
            yield of_every_length(at_most(what, target, 1e3 * max(times.values()), "ms"), times)
        peers = {tokens: rows[peer] for tokens, rows in found.items() if operation in rows.get(peer, {})}
        leads = {tokens: row[operation] / times[tokens] for tokens, row in peers.items()}
        if leads:
            least = min(leads, key=lambda tokens: leads[tokens])
            reached = f"{leads[least]:.2f} times faster at T {least:,}, the least of {len(leads)} lengths"
            yield of_every_length(Verdict(what, ahead, reached, leads[least] > 1), leads)


def judge_gates(parts: Parts) -> Iterator[Verdict]:
    for operation in OPERATIONS:
        pairs = [(rows[own("exp")], rows[own("sig")]) for _, rows in cases(parts, "lengths")]
        ratios = [exp[operation] / sig[operation] for exp, sig in pairs if operation in exp and operation in sig]
        if ratios:
            what = f"mLSTMexp over mLSTMsig: {operation}, largest over T"
            yield Verdict(what, f"at most {GATE_RATIO:g}", f"{max(ratios):.3f}", max(ratios) <= GATE_RATIO)


def judge_shapes(parts: Parts, gate: str) -> Iterator[Verdict]:
    for work, rows in cases(parts, "shapes"):
        for operation, target in SHAPES_MS.get(work, {}).items():
            what = f"mLSTM{gate}: {operation}, {gpu_parts.label(work)}"
            if operation in rows[own(gate)]:
                yield at_most(what, target, 1e3 * rows[own(gate)][operation], "ms")
            else:
                yield failed(what, f"at most {target:g} ms")


def judge_sweep(parts: Parts, gate: str) -> Iterator[Verdict]:
    for work, rows in cases(parts, "sweep"):
        for operation in OPERATIONS:
            peers = {name: row[operation] for name, row in rows.items() if "tfla" not in name and operation in row}
            if not peers:
                continue
            best = min(peers, key=lambda name: peers[name])
            faster = work.dqk in FASTER_DIMS
            what = f"mLSTM{gate}: {operation}, head dimension {work.dqk}"
            target = "faster than every peer" if faster else "no slower than the best peer"
            mine = rows[own(gate)].get(operation)
            if mine is None:
                yield failed(what, target)
                continue
            reached = f"{1e3 * mine:.3f} ms; {best} {1e3 * peers[best]:.3f}"
            ahead = mine < peers[best] if faster else mine <= peers[best]
            # A peer that fails is out; one that was not waited for might be faster.
            untimed = [name for name, row in rows.items() if row.get(f"{operation}_error", "").startswith(TOO_LATE)]
            if untimed:
                reached += f"; no time of {', '.join(untimed)}"
            yield Verdict(what, target, reached, ahead and not untimed, open=ahead and bool(untimed))


def judge_attention(parts: Parts, gate: str) -> Iterator[Verdict]:
    """By the length where tfla leads least. Lengths at which attention was too slow to be timed are not judged."""
    for operation, first in FASTER_THAN_ATTENTION.items():
        what = f"mLSTM{gate}: {operation}, against cuDNN attention"
        target = f"faster from T {first:,} on"
        leads: dict[int, float] = {}
        for work, rows in cases(parts, "attention"):
            theirs = rows.get(gpu_parts.ATTENTION, {}).get(operation)
            if work.tokens < first or theirs is None:
                continue
            mine = rows[own(gate)].get(operation)
            leads[work.tokens] = 0.0 if mine is None else theirs / mine
        if not leads:
            continue
        least = min(leads, key=lambda tokens: leads[tokens])
        reached = f"{leads[least]:.2f} times faster at T {least:,}, the least of {len(leads)} lengths"
        yield Verdict(what, target, reached if leads[least] else "fails", leads[least] > 1)


def judge_memory(parts: Parts, gate: str) -> Iterator[Verdict]:
    for case in parts.get("memory", {}).values():
        chunk, row = case["chunk"], case["rows"][own(gate)]
        if chunk not in PEAK_GB:
            continue
        what = f"mLSTM{gate}: peak memory of training, T {case['workload'][1]:,}, "
        what += f"chunk {chunk:,}" if chunk else "the default chunk"
        if "peak_bytes" in row:
            yield at_most(what, PEAK_GB[chunk], 1e-9 * row["peak_bytes"], "GB")
        else:
            yield failed(what, f"at most {PEAK_GB[chunk]:g} GB")


def judge_portable_memory(parts: Parts, gate: str) -> Iterator[Verdict]:
    rows = {case["chunk"]: case["rows"].get(own(gate, portable=True)) for case in parts.get("memory", {}).values()}
    peaks = {chunk: row.get("peak_bytes") for chunk, row in rows.items() if row is not None}
    for chunk, peak in peaks.items():
        what = f"portable kernels, mLSTM{gate}: peak memory of training, T {gpu_parts.MEMORY_TOKENS:,}, "
        what += f"chunk {chunk:,}" if chunk else "the default chunk"
        target = "less than at the default chunk" if chunk else f"at most {PORTABLE_PEAK_GB:g} GB"
        if peak is None:
            yield failed(what, target)
        elif chunk == 0:
            yield at_most(what, PORTABLE_PEAK_GB, 1e-9 * peak, "GB")
        elif peaks.get(0) is not None:
            yield Verdict(what, target, f"{1e-9 * peak:.3f} GB", peak < peaks[0])


def judge_step(parts: Parts) -> Iterator[Verdict]:
    for case in parts.get("step", {}).values():
        batch, row = case["batch"], case["rows"]["tfla"]
        if batch in STEP_MICROSECONDS:
            yield at_most(f"step, batch {batch}", STEP_MICROSECONDS[batch], 1e6 * row["seconds"], "us")
        if batch in STEP_TERABYTES:
            rate, target = 1e-12 * row["bytes_per_second"], STEP_TERABYTES[batch]
            yield Verdict(f"step, batch {batch}", f"at least {target:g} TB/s", f"{rate:.3f} TB/s", rate >= target)


def judge(parts: Parts) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for gate in GATES:
        for rule in (judge_lengths, judge_shapes, judge_sweep, judge_attention, judge_memory):
            verdicts += rule(parts, gate)
    verdicts += [*judge_gates(parts), *judge_step(parts)]
    for gate in GATES:
        verdicts += [*judge_portable_lengths(parts, gate), *judge_portable_memory(parts, gate)]
    return verdicts
