"""Times generation of tfla.lm: milliseconds a token by batch, beside transformers' xLSTM and the package xlstm, and
beside the time that reading all weights and states takes at the speed of a copy, which is measured in the same run.
Writes docs/benchmarks/generation.{json,md}; a run on a GPU leaves what was measured on a CPU, and the other way round.

Tokens come through `tfla.lm.generate.generate`, as in `python -m tfla.lm generate`, and are counted as they reach the
host. Weights are random: they do not change the time of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import tfla
from benchmarks.common.machine import busy_share, cpu_name
from benchmarks.common.versions import versions
from benchmarks.lm import generation_check, generation_page, generation_peers
from tfla.lm import Decoder, LanguageModel, preset
from tfla.lm.generate import Sampling, Session, generate
from tfla.lm.training.parallel import find_device

OUT = Path(__file__).resolve().parents[2] / "docs/benchmarks"
PROMPT, WARM_UP = 16, 8  # tokens of a prompt; tokens before the time is taken, the capture of the graph among them

EXAMPLES = """examples:
  PYTHONPATH=python python -m benchmarks.lm.generation                  measures, and writes both files
  PYTHONPATH=python python -m benchmarks.lm.generation --check          tokens and logits against the plain model
  PYTHONPATH=python python -m benchmarks.lm.generation --quick          a small model; writes nothing
  PYTHONPATH=python python -m benchmarks.lm.generation --device cpu     160m in float32 and bfloat16, batch 1
"""


@dataclass(frozen=True)
class Case:
    size: str
    batch: int
    dtype: str = "bfloat16"
    target: float | None = None  # milliseconds a token
    peers: bool = False


CASES = {
    "cuda": (
        Case("1.4b", 1, target=1.0, peers=True),
        Case("1.4b", 8, target=1.1),
        Case("1.4b", 64, target=2.3, peers=True),
        Case("1.4b", 256, target=6.5),
        Case("7b", 1, target=4.3),
        Case("7b", 64, target=8.5),
    ),
    "cpu": (Case("160m", 1, "float32", peers=True), Case("160m", 1)),
}
QUICK = {
    "cuda": (Case("160m", 1, peers=True), Case("160m", 8)),
    "cpu": (Case("tiny", 1, "float32", peers=True), Case("tiny", 2)),
}
PREFILL = ("1.4b", 8, 8192)  # size, sequences, tokens of each


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def copy_speed(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes together."""
    source = torch.randn(2**30 // 4 if device.type == "cuda" else 2**26, device=device)
    target = torch.randn_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device, 9)


def decoder(size: str, dtype: str, device: torch.device) -> Decoder:
    with device:  # made there: the weights of 7b take a minute on a host
        model = LanguageModel(preset(size), getattr(torch, dtype))
    return Decoder(model)


def tensors(x: Any) -> Iterator[Tensor]:
    """Those of a decoder's parts."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from tensors(part)
    elif hasattr(x, "__dict__"):
        yield from tensors(list(vars(x).values()))


def step_bytes(model: Decoder, states: Any) -> int:
    """What a step cannot do without: every weight but the embedding's is read, states are read and written."""
    weights = sum(x.nbytes for x in tensors([model.head, model.norm, model.mixers, model.ffns]))
    return weights + 2 * sum(x.nbytes for state in states for x in state)


def milliseconds_a_token(session: Session, sampling: Sampling, tokens: int, repeats: int) -> float:
    """Median over stretches of tokens, taken from one generation."""
    rows = generate(session, WARM_UP + repeats * tokens, sampling)
    for _ in range(WARM_UP):
        next(rows)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(tokens):
            next(rows)
        times.append(time.perf_counter() - begin)
    return 1e3 * median(times) / tokens


def measure(case: Case, model: Decoder, device: torch.device, quick: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, model.config.vocab, (case.batch, PROMPT), generator=generator).tolist()
    session = Session(model, prompts)
    tokens, repeats = (4, 2) if quick else (32, 5) if device.type == "cuda" else (8, 7)
    speed = copy_speed(device)  # beside each case: on a shared machine it changes
    row = asdict(case) | {"copy_bytes_per_second": speed, "bytes": step_bytes(model, session.states)}
    row["floor_ms"] = 1e3 * row["bytes"] / speed
    row["greedy_ms"] = milliseconds_a_token(session, Sampling(temperature=0), tokens, repeats)
    row["sampled_ms"] = milliseconds_a_token(session, Sampling(0.8, top_p=0.95), tokens, repeats)
    if case.peers:
        row["peers_ms"] = generation_peers.measure(model.config, prompts, case.dtype, device, 2 if quick else 12)
    return row


def measure_prefill(model: Decoder, device: torch.device) -> dict[str, Any]:
    size, batch, length = PREFILL
    tokens = torch.randint(0, model.config.vocab, (batch * length,), device=device)
    bounds = torch.arange(batch + 1, device=device, dtype=torch.int32) * length
    with torch.inference_mode():
        took = seconds(lambda: model.prefill(tokens, bounds), device, 3)
    weights = sum(x.numel() for x in tensors([model.mixers, model.ffns]) if x.dim() == 2)
    rate = 2 * weights * batch * length / took
    return {"size": size, "batch": batch, "tokens": length, "ms": 1e3 * took, "product_flops_per_second": rate}


def measure_all(device: torch.device, quick: bool) -> dict[str, Any]:
    busy = busy_share()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    cases = (QUICK if quick else CASES)[device.type]
    made, rows, prefill, model = None, [], None, None
    for case in cases:
        if made != (case.size, case.dtype):
            model = None  # before the next one is made
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            model, made = decoder(case.size, case.dtype, device), (case.size, case.dtype)
            if device.type == "cuda" and case.size == PREFILL[0] and not quick:
                prefill = measure_prefill(model, device)
        assert model is not None
        rows.append(measure(case, model, device, quick))
        print(json.dumps(rows[-1]), flush=True)
    made_with = {"tfla": tfla.__version__, "torch": torch.__version__, **versions("transformers", "xlstm")}
    return {
        "device": name, "threads": torch.get_num_threads(), "busy": busy,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": made_with,
        "rows": rows, "prefill": prefill,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens; writes nothing")
    parser.add_argument("--check", action="store_true", help="compare tokens and logits with the plain model instead")
    parser.add_argument("--page", action="store_true", help="only the page, from the folder's JSON file")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder (docs/benchmarks)")
    given = parser.parse_args()
    file = given.out / "generation.json"
    if given.check:
        return generation_check.main(find_device(given.device), given.quick)
    if not given.page:
        device = find_device(given.device)
        result = measure_all(device, given.quick)
        if given.quick:
            return 0
        given.out.mkdir(parents=True, exist_ok=True)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {device.type: result}, indent=1) + "\n")
    text = generation_page.page(json.loads(file.read_text()))
    (given.out / "generation.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
