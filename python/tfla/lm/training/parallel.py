"""Processes under torchrun: who takes which rows and which stretch of them, and the model on all of them."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tfla.lm.config import Recipe
from tfla.lm.model import LanguageModel

_T = TypeVar("_T")


@dataclass
class World:
    """rank = data * context_ranks + place: neighbours share a sequence."""

    rank: int = 0
    ranks: int = 1
    device: torch.device = torch.device("cpu")
    context_ranks: int = 1
    group: dist.ProcessGroup | None = None  # of the ranks that share this rank's sequences
    ours: bool = False  # whether the process group is ours to end

    @property
    def place(self) -> int:
        return self.rank % self.context_ranks

    @property
    def data_rank(self) -> int:
        return self.rank // self.context_ranks

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.context_ranks

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.ranks > 1:
            dist.all_reduce(x, op=op)
        return x

    def barrier(self) -> None:
        if self.ranks > 1:
            dist.barrier()

    def from_first(self, work: Callable[[], _T]) -> _T:
        """What rank 0 alone does: its result, or its error, is every rank's."""
        if self.ranks == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def close(self, together: bool) -> None:
        """together: after all ranks; one that leaves while another still works can make torch abort either of them."""
        if not self.ours:
            return
        if together:
            gc.collect()  # what is left of a spread model, with its own handles on the group
            dist.barrier()
        dist.destroy_process_group()


def find_device(name: str | None = None) -> torch.device:
    """By "cpu", "cuda" or "cuda:1"; without a name CUDA where there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ValueError(f"tfla: device is {name!r}; it must be 'cpu', 'cuda' or 'cuda:' and a number")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        raise ValueError(f"tfla: device is {name!r}; torch finds {count} CUDA devices here")
    return torch.device(name if kind == "cuda" else "cpu")


def join(recipe: Recipe, device: str | None = None) -> World:
    """The world as torchrun describes it, or this process alone."""
    here = find_device(device)
    kind = here.type
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if kind == "cuda":
        here = here if here.index is not None else find_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        torch.cuda.set_device(here)
    if ranks % recipe.context_parallel:
        raise ValueError(f"tfla: context_parallel is {recipe.context_parallel}; it must divide the {ranks} processes")
    world = World(rank, ranks, here, recipe.context_parallel)
    if ranks == 1:
        return world
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        world.ours = True
    if recipe.context_parallel > 1:
        mesh = init_device_mesh(kind, (world.data_ranks, world.context_ranks), mesh_dim_names=("data", "context"))
        world.group = mesh.get_group("context")
    return world


def spread(model: LanguageModel, recipe: Recipe, world: World) -> nn.Module:
    """The model as all ranks train it. Gradients are means over ranks in both ways."""
    model.group = world.group
    if recipe.compile:
        # Models of several configurations in one process share the code that is compiled.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for block in model.blocks:
            block.compile()  # block by block: compiled once for all of them
    model.compiled_loss = recipe.compile and world.device.type == "cuda"
    model.checkpoint_activations = recipe.checkpoint_activations
    if world.ranks == 1:
        return model
    if recipe.parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    mesh = init_device_mesh(world.device.type, (world.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unwrapped(model: nn.Module) -> LanguageModel:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, LanguageModel)
    return inner


@contextlib.contextmanager
def gradients(model: nn.Module, last: bool) -> Iterator[None]:
    """Around a micro-batch: gradients travel with the last one of a step only."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def total_norm(norm: Tensor) -> Tensor:
    """Of clip_grad_norm_, which for sharded parameters is spread as well."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
