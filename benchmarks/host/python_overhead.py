"""Host time that PyTorch and the Python package add to a call, over the bare C++ calls on the same tensors.

    make bench-python

Calls are so small that host time is nearly all of it. On a GPU they are enqueued and not waited for. Two tables: what
is added, beside what PyTorch itself takes on as many tensors before any operator does anything ("nothing" is an
autograd.Function that only allocates what it returns, "built-in" an operator of PyTorch's own, in C++ throughout); and
where the time of a call goes.
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
from tfla._torch import operators as library

EXAMPLES = """examples:
  make bench-python                                                         builds what is missing first
  PYTHONPATH=python python -m benchmarks.host.python_overhead --device cpu  on this machine's CPU
"""
BUILD = Path(__file__).parents[2] / "build" / "bindings"
NAMES = "q k v i f h dq dk dv di df C n m scratch".split()
OPERATIONS = {
    "forward": 0,
    "forward, no gradient": 0,
    "backward": 1,
    "forward + backward": 2,
    "in one thread": 2,
    "one of many": 2,
    "operators alone": 2,
    "CUDA graph": 2,
    "step": 3,
}
# Microseconds: of step the whole call (at batch 1 on the GPU), of the others what is added to the bare calls.
TARGETS = {"forward": 15.0, "forward + backward": 30.0, "operators alone": 30.0, "step": 12.0}
MANY = 11  # calls of one graph
WARM_UP = 1 / 8  # of the calls of a sample, before it: others have been in the caches until then


Timed = Callable[[], float]  # makes so many calls; seconds of one


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, i, f):
        ctx.save_for_backward(q, k, v, i, f)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx, dh):
        return tuple([torch.empty_like(x) for x in ctx.saved_tensors])


def built_in(q, k, v, i, f):
    return torch.stack((q, k, v, i, f))


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
        self.alike = [self.inputs[2].clone().requires_grad_() for _ in self.inputs]
        self.state = tfla.State(*(self.tensors[name] for name in "Cnm"))
        self.library = ctypes.CDLL(str(BUILD / "bindings" / "libtfla_bare_calls.so"))
        self.library.tfla_bare_calls.restype = ctypes.c_double

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def fastest(self, calls: dict[str, Timed]) -> dict[str, float]:
        """Microseconds of each: the fastest of many samples, taken in turn. Other programs only add to a sample, and a
        shared host changes its speed within seconds, so all are to meet its best moments."""
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(self.repetitions):
            for name, call in calls.items():
                self._wait()
                best[name] = min(best[name], 1e6 * call())
        return best

    def bare(self, operation: str, part: int = 0) -> Timed:
        """part: 0 all, 1 only the plan, 2 validation and plan."""
        pointers = (ctypes.c_void_p * len(NAMES))(*(self.tensors[name].data_ptr() for name in NAMES))
        shape = (ctypes.c_int64 * 5)(*self.shape)
        cuda = self.device == "cuda"
        stream = torch.cuda.current_stream().cuda_stream if cuda else None

        def call(count: int) -> float:
            return self.library.tfla_bare_calls(
                OPERATIONS[operation],
                part,
                int(cuda),
                torch.get_num_threads(),
                shape,
                pointers,
                ctypes.c_int64(4 * self.tensors["scratch"].numel()),
                ctypes.c_void_p(stream),
                count,
            )

        def once() -> float:
            call(int(WARM_UP * self.calls))
            return call(self.calls)

        return once

    def python(self, call: Callable[[], object], calls: int | None = None, grad: bool = True) -> Timed:
        """What calls return is kept until the clock has stopped: in training a graph is freed by backward, so that is
        no part of forward."""
        calls = calls or self.calls

        def once() -> float:
            results: list[object] = [None] * calls
            with torch.set_grad_enabled(grad):
                for _ in range(int(WARM_UP * calls)):
                    call()
                start = time.perf_counter()
                for index in range(calls):
                    results[index] = call()
                return (time.perf_counter() - start) / calls

        return once

    def _train(self, function: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> Timed:
        dh = torch.ones_like(function(*leaves))
        return self.python(lambda: torch.autograd.grad(function(*leaves), leaves, dh))

    def _in_one_thread(self, timed: Timed) -> Timed:
        """Where autograd has another thread for backward on a GPU, as it has unless told not to."""

        def once() -> float:
            with torch.autograd.set_multithreading_enabled(False):
                return timed()

        return once

    def _operators_alone(self) -> Timed:
        """Forward and backward by one call of an operator each, as a node of one's own would make them."""
        dh = self.tensors["h"]

        def train() -> object:
            h, saved = library.forward_with_saved_alone._op(*self.inputs)
            return library.backward_alone._op(dh, saved, *self.inputs)

        return self.python(train, grad=False)

    def _captured(self) -> Timed:
        """Forward and backward in a CUDA graph."""
        train = self._train(tfla.mlstm, self.leaves)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            train()
        torch.cuda.synchronize()
        dh = torch.ones_like(self.tensors["h"])
        with torch.cuda.graph(graph):
            self.captured = torch.autograd.grad(tfla.mlstm(*self.leaves), self.leaves, dh)
        return self.python(graph.replay)

    def _graph(self, function: Callable[..., torch.Tensor], count: int) -> Timed:
        """A graph of so many calls, in which the v of one is the h of the one before."""
        dh = torch.ones_like(self.tensors["h"])
        layers = [[x.clone().requires_grad_() for x in self.inputs] for _ in range(count)]

        def train() -> object:
            leaves = [self.leaves[2]]
            h = self.leaves[2]
            for q, k, _, i, f in layers:
                h = function(q, k, h, i, f)
                leaves += (q, k, i, f)
            return torch.autograd.grad(h, leaves, dh)

        return self.python(train, max(self.calls // MANY, 1))

    def rows(self) -> list[dict]:
        """What is added to the bare calls."""
        leaves, alike = self.leaves, self.alike
        calls = {
            "forward op": self.python(lambda: tfla.mlstm(*leaves)),
            "forward nothing": self.python(lambda: Nothing.apply(*leaves)),
            "forward built-in": self.python(lambda: built_in(*alike)),
            "forward + backward op": self._train(tfla.mlstm, leaves),
            "forward + backward nothing": self._train(Nothing.apply, leaves),
            "forward + backward built-in": self._train(built_in, alike),
            "in one thread op": self._in_one_thread(self._train(tfla.mlstm, leaves)),
            "in one thread nothing": self._in_one_thread(self._train(Nothing.apply, leaves)),
            "in one thread built-in": self._in_one_thread(self._train(built_in, alike)),
            "operators alone op": self._operators_alone(),
            "step op": self.python(lambda: tfla.mlstm_step(*self.inputs, self.state), grad=False),
        }
        rows = ["forward", "forward + backward", "in one thread", "one of many", "operators alone", "step"]
        if self.device == "cuda":
            calls["CUDA graph op"] = self._captured()
            rows.insert(-1, "CUDA graph")
        for name, function in {"op": tfla.mlstm, "nothing": Nothing.apply}.items():
            calls |= {f"{name}, {count}": self._graph(function, count) for count in (1, MANY)}
        times = self.fastest(calls | {f"{name} bare": self.bare(name) for name in rows})
        for name in ("op", "nothing"):  # what each further call adds to a graph
            times[f"one of many {name}"] = (times[f"{name}, {MANY}"] - times[f"{name}, 1"]) / (MANY - 1)
        return [self._row(name, times) for name in rows]

    def _row(self, name: str, times: dict[str, float]) -> dict:
        op, bare, target = times[f"{name} op"], times[f"{name} bare"], TARGETS.get(name)
        others = {column: times.get(f"{name} {column}") for column in ("nothing", "built-in")}
        met = None if target is None else (op if name == "step" else op - bare) <= target
        return {"operation": name, "op": op, "bare": bare, "added": op - bare, **others, "target": target, "met": met}

    def split(self) -> list[dict]:
        """Where the time goes, each part the difference of two measurements."""
        dh = self.tensors["h"]
        operators = {
            "forward, no gradient": lambda: library.forward_alone._op(*self.inputs),
            "forward": lambda: library.forward_with_saved_alone._op(*self.inputs),
            "backward": lambda: library.backward_alone._op(dh, None, *self.inputs),
            "step": lambda: library.step_alone._op(*self.inputs, *self.state),
        }

        def below_autograd(timed: Timed) -> Timed:
            def once() -> float:
                with torch._C._AutoDispatchBelowAutograd():
                    return timed()

            return once

        calls = {f"{name} op": below_autograd(self.python(call, grad=False)) for name, call in operators.items()}
        calls |= {f"{name} bare {part}": self.bare(name, part) for name in operators for part in range(3)}
        calls |= {
            "forward, no gradient": self.python(lambda: tfla.mlstm(*self.inputs), grad=False),
            "forward": self.python(lambda: tfla.mlstm(*self.leaves)),
            "both": self._train(tfla.mlstm, self.leaves),
            "step": self.python(lambda: tfla.mlstm_step(*self.inputs, self.state), grad=False),
        }
        times = self.fastest(calls)
        times["backward"] = times["both"] - times["forward"]
        package = times["forward, no gradient"] - times["forward, no gradient op"]
        rows = []
        for name in operators:
            whole, call = times[name], times[f"{name} op"]
            bare, plan, checked = (times[f"{name} bare {part}"] for part in range(3))
            # In backward nothing of the package runs but what autograd calls.
            front = {"forward": package, "backward": 0.0}.get(name, whole - call)
            parts = {"validation": checked - plan, "plan": plan, "run": bare - checked, "operator": call - bare}
            parts |= {"package": front, "autograd": whole - call - front}
            rows.append({"operation": name, **parts, "whole": whole})
        return rows


def show(rows: list[dict]) -> None:
    columns = [name for name in rows[0] if name not in ("operation", "met")]
    print(f"{'':22}" + "".join(f"{name:>12}" for name in columns))
    for row in rows:
        numbers = "".join(f"{'-':>12}" if row.get(name) is None else f"{row[name]:12.1f}" for name in columns)
        print(f"{row['operation']:22}{numbers}  " + {True: "met", False: "missed", None: ""}[row.get("met")])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=100, help="samples of each call")
    parser.add_argument("--calls", type=int, default=80, help="calls per sample (a GPU's queue takes 1,024 kernels)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.device, (1, 1, 1, 16, 16), options.repetitions, options.calls)
    rows, split = bench.rows(), bench.split()
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {options.device} ({where}), microseconds of host time per call")
    show(rows)
    print(
        "The target of step is for the whole call, of the others for what is added. in one thread: forward + backward\n"
        "under torch.autograd.set_multithreading_enabled(False). one of many: what each further call adds to a graph\n"
        "of several, without the start of autograd's engine, which a graph pays for once. operators alone: forward\n"
        "and backward as two calls of operators, without autograd. CUDA graph: both, captured, per replay.\n"
    )
    show(split)
    print(
        "validation, plan, run: the bare call. operator: the dispatcher, conversion of arguments, outputs, scratch.\n"
        "package: tfla's Python in front of the operator. autograd: torch.autograd.Function, and for backward the\n"
        "engine and torch.autograd.grad."
    )
    if options.json:
        content = {"torch": torch.__version__, "device": where, "microseconds": rows, "split": split}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
