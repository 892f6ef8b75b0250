"""The machine that a benchmark runs on, and whether it is free."""

from __future__ import annotations

import platform
import time
from pathlib import Path


def cpu_name() -> str:
    """As the kernel calls the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def busy_share() -> float:
    """The share of all cores' time that other processes take just now."""

    def idle_and_total() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return fields[3] + fields[4], sum(fields)

    idle_before, total_before = idle_and_total()
    time.sleep(1)
    idle_after, total_after = idle_and_total()
    return 1 - (idle_after - idle_before) / (total_after - total_before)
