"""Host time that PyTorch and the Python package add to a call, over the bare C++ calls on the same tensors.

    make bench-python

Calls are so small that host time is nearly all of it. On a GPU they are enqueued and not waited for. "nothing" is an
autograd.Function that computes nothing on as many tensors: what PyTorch itself takes before any operator does anything.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tfla

BUILD = Path(__file__).parents[1] / "build" / "bindings"
NAMES = "q k v i f h dq dk dv di df C n m scratch".split()
OPERATIONS = {"forward": 0, "forward + backward": 2, "step": 3}
# Microseconds: of the first two what is added to the bare calls, of step the whole call (at batch 1 on the GPU).
TARGETS = {"forward": 15.0, "forward + backward": 30.0, "step": 12.0}


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, i, f):
        ctx.save_for_backward(q, k, v, i, f)
        return v.view_as(v)

    @staticmethod
    def backward(ctx, dh):
        return ctx.saved_tensors


class Bench:
    def __init__(self, device: str, shape: tuple[int, int, int, int, int], repetitions: int, calls: int) -> None:
        self.device, self.shape, self.repetitions, self.calls = device, shape, repetitions, calls
        B, T, H, dqk, dhv = shape
        sizes = {
            **dict.fromkeys(("q", "k", "dq", "dk"), (B, T, H, dqk)),
            **dict.fromkeys(("v", "h", "dv"), (B, T, H, dhv)),
            **dict.fromkeys(("i", "f", "di", "df"), (B, T, H)),
            "C": (B, H, dqk, dhv),
            "n": (B, H, dqk),
            "m": (B, H),
            "scratch": (1 << 22,),
        }
        torch.manual_seed(0)
        self.tensors = {name: torch.randn(sizes[name], device=device) for name in NAMES}
        self.tensors["m"].zero_()
        self.inputs = [self.tensors[name] for name in "qkvif"]
        self.leaves = [x.clone().requires_grad_() for x in self.inputs]
        self.state = tfla.State(*(self.tensors[name] for name in "Cnm"))
        self.library = ctypes.CDLL(str(BUILD / "bindings" / "libtfla_bare_calls.so"))
        self.library.tfla_bare_calls.restype = ctypes.c_double

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _best(self, once: Callable[[], float]) -> float:
        """Microseconds per call: the fastest of repetitions of `calls` calls each; other programs only add to it."""
        times = []
        for _ in range(self.repetitions):
            self._wait()
            times.append(1e6 * once())
        return min(times)

    def bare(self, operation: str) -> float:
        pointers = (ctypes.c_void_p * len(NAMES))(*(self.tensors[name].data_ptr() for name in NAMES))
        shape = (ctypes.c_int64 * 5)(*self.shape)
        cuda = self.device == "cuda"
        stream = torch.cuda.current_stream().cuda_stream if cuda else None
        return self._best(
            lambda: self.library.tfla_bare_calls(
                OPERATIONS[operation],
                int(cuda),
                torch.get_num_threads(),
                shape,
                pointers,
                ctypes.c_int64(4 * self.tensors["scratch"].numel()),
                ctypes.c_void_p(stream),
                self.calls,
            )
        )

    def python(self, call: Callable[[], object]) -> float:
        def once() -> float:
            start = time.perf_counter()
            for _ in range(self.calls):
                call()
            return (time.perf_counter() - start) / self.calls

        return self._best(once)

    def _train(self, function: Callable[..., torch.Tensor]) -> Callable[[], object]:
        dh = self.tensors["h"]
        return lambda: torch.autograd.grad(function(*self.leaves), self.leaves, dh)

    def rows(self) -> list[dict]:
        calls = {
            "forward": (lambda: tfla.mlstm(*self.leaves), lambda: Nothing.apply(*self.leaves)),
            "forward + backward": (self._train(tfla.mlstm), self._train(Nothing.apply)),
            "step": (lambda: tfla.mlstm_step(*self.inputs, self.state), lambda: None),
        }
        rows = []
        for name, (call, nothing) in calls.items():
            with torch.set_grad_enabled(name != "step"):
                op, bare = self.python(call), self.bare(name)
            added = op - bare
            met = (op if name == "step" else added) <= TARGETS[name]
            times = {"op": op, "bare": bare, "added": added, "nothing": self.python(nothing), "target": TARGETS[name]}
            rows.append({"operation": name, **times, "met": met})
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200, help="calls per repetition (few enough for a GPU's queue)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = Bench(options.device, (1, 1, 1, 16, 16), options.repetitions, options.calls).rows()
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {options.device} ({where}), microseconds of host time per call")
    columns = ("op", "bare", "added", "nothing", "target")
    print(f"{'operation':20}" + "".join(f"{name:>9}" for name in columns))
    for row in rows:
        numbers = "".join(f"{row[name]:9.1f}" for name in columns)
        print(f"{row['operation']:20}{numbers}  {'met' if row['met'] else 'missed'}")
    print("the target of step is for the whole call, of the others for what is added")
    if options.json:
        content = {"torch": torch.__version__, "device": where, "microseconds": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
