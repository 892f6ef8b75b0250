"""A target, what was measured, and whether it is met."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    what: str
    target: str
    measured: str
    met: bool
    open: bool = False  # not met, for want of a measurement

    @property
    def word(self) -> str:
        return "met" if self.met else "open" if self.open else "missed"


def at_most(what: str, target: float, reached: float, unit: str) -> Verdict:
    return Verdict(what, f"at most {target:g} {unit}", f"{reached:.3f} {unit}", reached <= target)


def at_least(what: str, target: float, reached: float, unit: str) -> Verdict:
    return Verdict(what, f"at least {target:g} {unit}", f"{reached:.3f} {unit}", reached >= target)


def failed(what: str, target: str) -> Verdict:
    return Verdict(what, target, "fails", False)


def unmeasured(what: str, target: str, why: str) -> Verdict:
    return Verdict(what, target, why, False, open=True)


def as_json(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    return [asdict(verdict) for verdict in verdicts]
