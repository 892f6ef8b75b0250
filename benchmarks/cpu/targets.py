"""The targets of the CPU backend and whether a set of measurements meets them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.common.verdict import Verdict

Measurements = dict[str, Any]

FASTER = {"forward": 2.5, "training": 3.0}
PRODUCT_SHARE = 0.50
BFLOAT16_TIME = 1.30
GROWTH = 1.15
SCRATCH_SHARE = 0.25
COPY_SHARE = 0.70
JUDGED_TOKENS = (2048, 8192)
OPERATIONS = ("forward", "training")
LABEL = {"forward": "forward", "training": "forward+backward"}


def over_rounds(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    """The median over the rounds; ratios are formed inside a round, where both sides saw the same machine."""
    return median(value(row) for row in rows)


def speedup(rounds: list[dict[str, Any]]) -> float:
    return over_rounds(rounds, lambda row: row["peer_seconds"] / row["tfla_seconds"])


def fastest(turns: list[dict[str, dict[str, float]]]) -> dict[int, float]:
    """Seconds by length, shortest first: the fastest sample of all turns. Whatever else a machine does makes a call
    slower, never faster. Samples of all lengths take the same time, so that none of them slips through more often."""
    found: dict[int, float] = {}
    for turn in turns:
        for key, seconds in turn.items():
            found[int(key)] = min(seconds["fastest"], found.get(int(key), seconds["fastest"]))
    return dict(sorted(found.items()))


def growth(turns: list[dict[str, dict[str, float]]]) -> float:
    """The largest time per token over that of the shortest sequence."""
    per_token = [seconds / count for count, seconds in fastest(turns).items()]
    return max(per_token) / per_token[0]


def judge(measured: Measurements) -> list[Verdict]:
    return [
        *judge_peer(measured),
        *judge_product(measured),
        *judge_bfloat16(measured),
        *judge_growth(measured),
        *judge_scratch(measured),
        *judge_step(measured),
    ]


def judged(measured: Measurements, operation: str) -> list[dict[str, Any]]:
    return [case for case in measured["compare"] if case["operation"] == operation and case["tokens"] in JUDGED_TOKENS]


def judge_peer(measured: Measurements) -> list[Verdict]:
    verdicts = []
    for operation in OPERATIONS:
        for case in judged(measured, operation):
            ratio = speedup(case["rounds"])
            verdicts.append(
                Verdict(
                    f"{LABEL[operation]}, T {case['tokens']:,}, against mlstm_kernels",
                    f"at least {FASTER[operation]:g} times faster",
                    f"{ratio:.2f} times",
                    ratio >= FASTER[operation],
                )
            )
    return verdicts


def judge_product(measured: Measurements) -> list[Verdict]:
    verdicts = []
    for case in judged(measured, "forward"):
        share = over_rounds(case["rounds"], lambda row: row["tfla_flops"] / row["product_flops"])
        verdicts.append(
            Verdict(
                f"forward rate, T {case['tokens']:,}, of one large float32 product",
                f"at least {PRODUCT_SHARE:.0%}",
                f"{share:.0%}",
                share >= PRODUCT_SHARE,
            )
        )
    return verdicts


def judge_bfloat16(measured: Measurements) -> list[Verdict]:
    verdicts = []
    for operation in OPERATIONS:
        for case in judged(measured, operation):
            ratio = over_rounds(case["rounds"], lambda row: row["tfla_bfloat16_seconds"] / row["tfla_seconds"])
            verdicts.append(
                Verdict(
                    f"bfloat16 time over float32 time, {LABEL[operation]}, T {case['tokens']:,}",
                    f"at most {BFLOAT16_TIME:g}",
                    f"{ratio:.2f}",
                    ratio <= BFLOAT16_TIME,
                )
            )
    return verdicts


def judge_growth(measured: Measurements) -> list[Verdict]:
    verdicts = []
    for operation in OPERATIONS:
        turns = measured["growth"][operation]["turns"]
        tokens = list(fastest(turns))
        ratio = growth(turns)
        verdicts.append(
            Verdict(
                f"time per token, {LABEL[operation]}, largest of T {tokens[0]:,} to {tokens[-1]:,} over the first",
                f"at most {GROWTH:g}",
                f"{ratio:.2f}",
                ratio <= GROWTH,
            )
        )
    return verdicts


def judge_scratch(measured: Measurements) -> list[Verdict]:
    verdicts = []
    for operation in OPERATIONS:
        shares = measured["growth"][operation]["scratch_share"]
        tokens, share = max(shares.items(), key=lambda item: item[1])
        verdicts.append(
            Verdict(
                f"scratch over inputs and outputs, {LABEL[operation]}, largest (T {int(tokens):,})",
                f"below {SCRATCH_SHARE:.0%}",
                f"{share:.1%}",
                share < SCRATCH_SHARE,
            )
        )
    return verdicts


def judge_step(measured: Measurements) -> list[Verdict]:
    verdicts = []
    for case in measured["step"]:
        share = over_rounds(case["rounds"], lambda row: row["state_rate"] / row["copy_rate"])
        verdicts.append(
            Verdict(
                f"step, batch {case['batch']}, state traffic of copy bandwidth",
                f"at least {COPY_SHARE:.0%}",
                f"{share:.0%}",
                share >= COPY_SHARE,
            )
        )
    return verdicts
