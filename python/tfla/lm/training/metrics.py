"""What is reported of a run: floating-point operations against the peak, log files, a line of progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tfla.lm.models.base import ModelConfig, find

# Dense bfloat16 peaks of the tensor cores, FLOP/s, by a part of the device's name.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40": 181e12}


def flops_per_token(config: ModelConfig, context: int) -> float:
    """Of training, forward and backward, as the kind of model counts it."""
    return find(config.kind).flops_per_token(config, context)


def peak_flops(device: torch.device) -> float | None:
    """Of one device: a GPU's from the table; a CPU's is the best that matrix products of several sizes reach."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in PEAKS.items() if part in name), None)
    best = 0.0
    for size in (256, 512, 1024, 1536):
        a, b, c = (torch.randn(size, size) for _ in range(3))
        end, runs = time.perf_counter() + 0.1, 0
        while runs < 4 or time.perf_counter() < end:
            begin = time.perf_counter()
            torch.mm(a, b, out=c)
            best = max(best, 2 * size**3 / (time.perf_counter() - begin))
            runs += 1
    return best


class Utilisation:
    """Operations per second as a part of the peak. One that is exceeded was too low: it is raised to what was seen."""

    def __init__(self, peak: float | None) -> None:
        self.peak = peak

    def of(self, flops: float) -> float | None:
        if self.peak is None:
            return None
        self.peak = max(self.peak, flops)
        return flops / self.peak


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"tfla: {path} cannot be written: {error.strerror}; what was saved before is kept") from None


class Log:
    """JSON lines in RUN/log.jsonl and, where tensorboard is installed, RUN/tensorboard."""

    def __init__(self, run: Path, step: int, tensorboard: bool) -> None:
        """step: where the run goes on; lines of steps from there on, of a run that went further, are dropped."""
        self._path = run / "log.jsonl"
        with _writing(self._path):
            run.mkdir(parents=True, exist_ok=True)
            kept = [line for line in read_log(self._path) if line["step"] <= step] if step else []
            new = run / ".log.jsonl.partial"
            with new.open("w") as file:
                file.writelines(json.dumps(line) + "\n" for line in kept)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
            self._file = self._path.open("a")
        self._board = self._open_board(run / "tensorboard", step) if tensorboard else None

    @staticmethod
    def _open_board(directory: Path, step: int) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(directory), purge_step=step + 1 if step else None)

    def write(self, line: dict[str, Any]) -> None:
        with _writing(self._path):
            self._file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in line.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, line["step"])

    def flush(self) -> None:
        with _writing(self._path):
            self._file.flush()

    def close(self) -> None:
        with _writing(self._path):
            self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a log; those that a crash or a full disk cut off are left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line now and then."""

    def __init__(self, steps: int, enabled: bool) -> None:
        self.steps, self.enabled = steps, enabled
        self._terminal = sys.stderr.isatty()
        self._shown = 0.0

    def show(self, step: int, words: str) -> None:
        now = time.monotonic()
        if not self.enabled or (not self._terminal and now - self._shown < 10 and step != self.steps):
            return
        self._shown = now
        done = round(24 * step / self.steps)
        bar = "#" * done + "." * (24 - done)
        text = f"{bar} {step}/{self.steps}  {words}"
        self._print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n")

    def close(self) -> None:
        if self.enabled and self._terminal:
            self._print()

    def _print(self, text: str = "", end: str = "\n") -> None:
        try:
            print(text, end=end, file=sys.stderr, flush=True)
        except OSError:  # the terminal is gone; the run is not
            self.enabled = False
