"""What every rank of test_distributed.py runs: `python distributed_worker.py WHAT RANK RANKS STORE`."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import tfla
from delta_inputs import leaves, make_delta, make_delta_state, mapped
from inputs import make_inputs, make_state
from tfla import distributed
from tfla.nn import MLSTMLayer
from tfla.reference import relative_error

CASES = {
    "exp": {},
    "exp_without_normalizer": {"normalizer": "none"},
    "sigmoid": {"gate": "sigmoid"},
    "sigmoid_with_max": {"gate": "sigmoid", "normalizer": "max"},
    "log": {"gate": "log"},
    "exact": {"exact_normalizer_grad": True},
    "soft_cap": {"soft_cap": 4.0, "qk_scale": 0.3, "eps": 1e-4, "chunk_size": 16},
    "heads_first": {"layout": "bhtd"},
    "state": {"initial_state": True},
}


def cut(x: torch.Tensor, axis: int, rank: int, ranks: int) -> torch.Tensor:
    """Stretches of different lengths; with four ranks one of them is empty."""
    bounds = {1: [0, 50], 2: [0, 17, 50], 4: [0, 9, 30, 30, 50]}[ranks]
    return x.narrow(axis, bounds[rank], bounds[rank + 1] - bounds[rank])


def compare(options: dict, resets: bool, rank: int, ranks: int) -> None:
    options = dict(options)
    given = make_inputs(tokens=50, qk_heads=1, dtype=torch.float64, seed=3)
    if options.get("gate") == "log":
        given.i, given.f = 0.2 * given.i, F.logsigmoid(given.f - 3)
    if resets:
        given.f[:, [8, 21, 33]] = float("-inf")
    axis = 1
    if options.get("layout") == "bhtd":
        given, axis = given.map(lambda x: x.transpose(1, 2).contiguous()), 2
    m = 0.3 if options.get("gate", "exp") == "exp" else 0.0
    state = make_state(2, 2, 8, 12, torch.float64, m=m) if options.pop("initial_state", False) else None

    def leaves():
        return None if state is None else [x.clone().requires_grad_(x.dim() > 2) for x in state]

    whole, whole_state = given.leaves(), leaves()
    h, last = tfla.mlstm(*whole, initial_state=whole_state, output_final_state=True, **options)
    dh = torch.randn(h.shape, dtype=h.dtype, generator=torch.Generator().manual_seed(1))
    h.backward(dh)

    mine = given.map(lambda x: cut(x, axis, rank, ranks)).leaves()
    my_state = leaves() if rank == 0 else None
    part, final = distributed.mlstm(*mine, initial_state=my_state, output_final_state=True, **options)
    part.backward(cut(dh, axis, rank, ranks))

    results = {"h": (part, cut(h, axis, rank, ranks))}
    results |= {f"final {name}": pair for name, pair in zip("Cnm", zip(final, last, strict=True), strict=True)}
    pairs = zip(mine, whole, strict=True)
    results |= {
        f"d{name}": (x.grad, cut(y.grad, axis, rank, ranks)) for name, (x, y) in zip("qkvif", pairs, strict=True)
    }
    if my_state is not None:
        results |= {f"d{name}": (my_state[j].grad, whole_state[j].grad) for j, name in enumerate(("C", "n"))}
    for name, (actual, expected) in results.items():
        error = relative_error(actual, expected)
        assert error < 1e-10, f"{name} of rank {rank}: {error:.2e}"


def context(rank: int, ranks: int) -> None:
    """Context parallel gives the results of one device."""
    for name, options in CASES.items():
        for resets in (False, True):
            try:
                compare(options, resets, rank, ranks)
            except AssertionError as error:
                raise AssertionError(f"{name}, resets={resets}: {error}") from error


DELTA_CASES = {
    "no decay": {"g": False},
    "decay": {},
    "fused gates": {"A_log": True, "dt_bias": True, "raw_beta": True},
}
DELTA_OPTIONS = {
    "fused gates": {"write": "twice_sigmoid", "normalize_qk": True, "qk_scale": 0.3, "chunk_size": 8},
}


def compare_delta(name: str, layout: str, with_state: bool, rank: int, ranks: int) -> None:
    given = make_delta(tokens=50, dtype=torch.float64, seed=3, **DELTA_CASES[name])
    options = {**DELTA_OPTIONS.get(name, {}), "layout": layout}
    if name == "decay":
        given["g"][:, [8, 21, 33]] = float("-inf")
    axis = 2 if layout == "bhtd" else 1
    if layout == "bhtd":
        given = mapped(lambda x: x.transpose(1, 2).contiguous(), given)
    if with_state:
        given["initial_state"] = make_delta_state(dtype=torch.float64)
    whole = leaves(given)
    h, last = tfla.delta_rule(**whole, output_final_state=True, **options)
    dh = torch.randn(h.shape, dtype=h.dtype, generator=torch.Generator().manual_seed(1))
    h.backward(dh)

    mine = leaves(mapped(lambda x: cut(x, axis, rank, ranks), given))
    if rank > 0:
        mine.pop("initial_state", None)
    part, final = distributed.delta_rule(**mine, output_final_state=True, **options)
    part.backward(cut(dh, axis, rank, ranks))
    results = {"h": (part, cut(h, axis, rank, ranks)), "final": (final, last)}
    for key, x in mine.items():
        grad = x.grad
        if key in ("A_log", "dt_bias"):  # of a rank's own tokens
            grad = grad.clone()
            dist.all_reduce(grad)
        results[f"d{key}"] = grad, mapped(lambda y: cut(y, axis, rank, ranks), {key: whole[key].grad})[key]
    for key, (actual, expected) in results.items():
        error = relative_error(actual, expected)
        assert error < 1e-10, f"{key} of rank {rank}: {error:.2e}"


def delta(rank: int, ranks: int) -> None:
    """The delta rule gives the results of one device."""
    for name in DELTA_CASES:
        for layout in ("bthd", "bhtd"):
            for with_state in (False, True):
                try:
                    compare_delta(name, layout, with_state, rank, ranks)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {layout}, with_state={with_state}: {error}") from error


class Dropped(torch.autograd.Function):
    """Passes x on, and no gradient back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> None:
        return None


def unused(rank: int, ranks: int) -> None:
    """Where one rank's h has no gradient, that of the others still passes through its tokens."""
    given = make_inputs(tokens=50, dtype=torch.float64, seed=3)
    whole = given.leaves()
    h = tfla.mlstm(*whole)
    torch.cat([cut(h, 1, other, ranks) for other in range(ranks) if other != 1], dim=1).square().sum().backward()
    mine = given.map(lambda x: cut(x, 1, rank, ranks)).leaves()
    part = distributed.mlstm(*mine)
    (Dropped.apply(part) if rank == 1 else part).square().sum().backward()
    for name, x, y in zip("qkvif", mine, whole, strict=True):
        error = relative_error(x.grad, cut(y.grad, 1, rank, ranks))
        assert error < 1e-10, f"d{name} of rank {rank}: {error:.2e}"


def unused_delta(rank: int, ranks: int) -> None:
    """The same of the delta rule."""
    given = make_delta(tokens=50, dtype=torch.float64, seed=3)
    whole = leaves(given)
    h = tfla.delta_rule(**whole)
    torch.cat([cut(h, 1, other, ranks) for other in range(ranks) if other != 1], dim=1).square().sum().backward()
    mine = leaves(mapped(lambda x: cut(x, 1, rank, ranks), given))
    part = distributed.delta_rule(**mine)
    (Dropped.apply(part) if rank == 1 else part).square().sum().backward()
    for name, x in mine.items():
        error = relative_error(x.grad, cut(whole[name].grad, 1, rank, ranks))
        assert error < 1e-10, f"d{name} of rank {rank}: {error:.2e}"


def data_parallel(rank: int, ranks: int) -> None:
    """DDP and FSDP2 around a layer: gradients are those of the whole batch on one device."""
    torch.manual_seed(0)
    x = torch.randn(2 * ranks, 11, 16, dtype=torch.float64)

    def layer() -> MLSTMLayer:
        torch.manual_seed(1)
        return MLSTMLayer(16, 2, dtype=torch.float64)

    alone = layer()
    (alone(x).square().sum() / ranks).backward()
    local = x.tensor_split(ranks)[rank]

    ddp = torch.nn.parallel.DistributedDataParallel(layer())
    ddp(local).square().sum().backward()
    sharded = layer()
    torch.distributed.fsdp.fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    sharded(local).square().sum().backward()
    for (name, expected), one, other in zip(
        alone.named_parameters(), ddp.parameters(), sharded.parameters(), strict=True
    ):
        assert relative_error(one.grad, expected.grad) < 1e-10, f"DDP: {name}"
        assert relative_error(other.grad.full_tensor(), expected.grad) < 1e-10, f"FSDP2: {name}"


def refuse_state_elsewhere(rank: int, ranks: int) -> None:
    """An initial state on another rank than the first is an error, there and before anything is sent."""
    if rank == 0:
        return
    calls = (
        lambda: distributed.mlstm(*make_inputs(), initial_state=make_state(2, 2, 8, 12)),
        lambda: distributed.delta_rule(**make_delta(), initial_state=make_delta_state()),
    )
    for call in calls:
        try:
            call()
        except ValueError as error:
            assert "initial_state is given on another rank" in str(error)
        else:
            raise AssertionError("accepted")


def main() -> None:
    what, rank, ranks, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    parts = (context, delta, unused, unused_delta, data_parallel, refuse_state_elsewhere)
    {part.__name__: part for part in parts}[what](rank, ranks)
    # A rank that leaves while another still works can make torch abort either of them.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
