"""The training loop: the paper's recipe on one process or many, stopped and resumed at any step."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tfla.lm import checkpoint
from tfla.lm.config import ModelConfig, Recipe
from tfla.lm.data import Dataset, Order
from tfla.lm.evaluate import evaluate
from tfla.lm.fields import from_dict
from tfla.lm.metrics import Log, Progress, flops_per_token, peak_flops
from tfla.lm.model import LanguageModel
from tfla.lm.optimizer import learning_rate, make_optimizer
from tfla.lm.parallel import World, gradients, join, spread, total_norm, unwrapped


@dataclass(frozen=True)
class Run:
    """Where a run lives and what it reports; nothing of it changes a loss."""

    directory: Path
    log_every: int = 10
    save_every: int | None = 500  # None: no checkpoint at all, for measurements
    eval_every: int | None = None
    eval_rows: int | None = None
    keep: int = 2  # checkpoints
    stop_after: int | None = None  # stop at this step as a signal would
    time_limit: float | None = None  # seconds
    device: str | None = None
    tensorboard: bool = True
    progress: bool = True
    peak: float | None = None  # FLOP/s of one device, for the utilisation
    begin_from: Path | None = None  # a checkpoint whose weights a new run begins with


class Stop:
    """Set by SIGINT and SIGTERM; the loop ends after its step. A second signal ends the process as usual."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread
            pass
        return self

    def _handle(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(number, self._before[number])

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def vocabulary(data: Dataset) -> int:
    """Of the model: that of the tokenizer, rounded up to what matrix products like."""
    return -(-data.vocab // 64) * 64


def train(config: ModelConfig, recipe: Recipe, data_path: Path, run: Run) -> dict[str, Any]:
    """Trains to the last step or until stopped, from the run's last checkpoint if it has one. Returns a summary."""
    world = join(recipe, run.device)
    summary: dict[str, Any] | None = None
    try:
        summary = _Trainer(config, recipe, data_path, run, world).train()
        return summary
    finally:
        world.close(together=summary is not None)


class _Trainer:
    def __init__(self, config: ModelConfig, recipe: Recipe, data_path: Path, run: Run, world: World) -> None:
        self.recipe, self.run, self.world = recipe, run, world
        self.local = _local_batch(recipe, world)
        self.micro = min(recipe.micro_batch or self.local, self.local)
        if self.local % self.micro:
            raise ValueError(f"tfla: micro_batch is {self.micro}; it must divide the {self.local} sequences of a rank")
        self.data = Dataset(data_path, "train", recipe.context)
        if self.data.vocab > config.vocab:
            raise ValueError(f"tfla: vocab is {config.vocab}; {data_path} has {self.data.vocab} tokens")
        self.order = Order(self.data.whole_rows, recipe.seed)
        self.about = checkpoint.describe(config, recipe, self.data)
        torch.manual_seed(recipe.seed)
        dtype = recipe.dtype or ("bfloat16" if world.device.type == "cuda" else "float32")
        model = LanguageModel(config, getattr(torch, dtype)).to(world.device)
        last = checkpoint.latest(run.directory)
        if last is None and run.begin_from is not None:
            checkpoint.load_weights(run.begin_from, model)
        self.model: nn.Module = spread(model, recipe, world)
        self.optimizer = make_optimizer(self.model, recipe)
        self.flops = flops_per_token(config, recipe.context)
        self.step = 0
        if last is not None:
            self.step = checkpoint.load(last, self.model, self.optimizer, self.about, world)

    def train(self) -> dict[str, Any]:
        run, recipe, world = self.run, self.recipe, self.world
        self.log = Log(run.directory, self.step, run.tensorboard) if world.first else None
        self.progress = Progress(recipe.steps, run.progress and world.first)
        self.peak = run.peak or (peak_flops(world.device) if world.first else None)
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.summary: dict[str, Any] = {"steps": recipe.steps, "begun_at": self.step}
        saved = self.step
        begin = self.since = time.monotonic()
        with Stop() as stop:
            stopped = self.step >= recipe.steps
            while not stopped:
                self._update()
                done = self.step >= recipe.steps
                enough = self.step == run.stop_after
                late = run.time_limit is not None and time.monotonic() - begin > run.time_limit
                stopped = done or enough or ((stop.asked or late) and world.ranks == 1)
                saving = run.save_every is not None and self.step % run.save_every == 0
                if self.step % run.log_every == 0 or saving or stopped:  # what is saved is logged, and is finite
                    stopped = self._flush(stop.asked or late) or stopped
                # A run that its time limit ends is to be judged as well; one that a signal ends has no time for that.
                over = done or (late and world.ranks == 1)
                if run.eval_every and (self.step % run.eval_every == 0 or over):
                    self._evaluate()
                if saving or (stopped and run.save_every is not None):
                    checkpoint.save(
                        run.directory, self.step, self.model, self.optimizer, self.about, world, keep=run.keep
                    )
                    saved = self.step
                    self.since = time.monotonic()
        self.progress.close()
        if self.log is not None:
            self.log.close()
        self.summary |= {"step": self.step, "finished": self.step >= recipe.steps, "seconds": time.monotonic() - begin}
        self.summary["checkpoint"] = str(checkpoint.directory(run.directory, saved)) if run.save_every else None
        return self.summary

    def _update(self) -> None:
        """One step: micro-batches, clipped gradient, update."""
        recipe, world = self.recipe, self.world
        first = self.step * recipe.batch + world.data_rank * self.local
        rows = [self.order.row(first + j) for j in range(self.local)]
        scale = world.ranks / (recipe.batch * recipe.context)  # both ways of spreading take means over ranks
        total: Tensor | None = None
        gate: Tensor | None = None
        for begin in range(0, self.local, self.micro):
            batch = self.data.batch(rows[begin : begin + self.micro])
            if world.context_ranks > 1:
                batch = batch.stretch(world.place, world.context_ranks)
            batch = batch.to(world.device)
            with gradients(self.model, last=begin + self.micro == self.local):
                loss = self.model(batch.inputs, batch.targets, batch.documents).total
                (loss * scale).backward()
            total = loss.detach() if total is None else total + loss.detach()
            largest = unwrapped(self.model).input_gate_max()
            gate = largest if gate is None or largest is None else torch.maximum(gate, largest)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        assert total is not None
        # A gradient norm is that of all ranks already; the maximum is the only thing to be taken over them.
        values = torch.stack(
            [total_norm(norm).float(), gate.float() if gate is not None else norm.new_tensor(math.nan)]
        )
        self.pending.append((self.step, total, values))

    def _flush(self, wish: bool) -> bool:
        """Reports the steps since the last time; the only place that waits for the device. Whether to stop."""
        world, recipe = self.world, self.recipe
        losses = torch.stack([loss for _, loss, _ in self.pending]).double()
        others = torch.cat(
            [torch.stack([row for _, _, row in self.pending]).flatten(), losses.new_tensor([wish]).float()]
        )
        losses = world.sum(losses) / (recipe.batch * recipe.context)
        others = world.sum(others, dist.ReduceOp.MAX).cpu()
        now = time.monotonic()
        seconds = (now - self.since) / len(self.pending)
        self.since = now
        rate = recipe.batch * recipe.context / seconds
        mfu = None if self.peak is None else rate * self.flops / (self.peak * world.ranks)
        rows = zip(self.pending, losses.tolist(), others[:-1].view(-1, 2).tolist(), strict=True)
        for (step, _, _), loss, (norm, gate) in rows:
            line = {
                "step": step, "loss": loss, "gradient_norm": norm, "input_gate_max": None if math.isnan(gate) else gate,
                "lr": learning_rate(recipe, step - 1), "tokens": step * recipe.batch * recipe.context,
                "tokens_per_second": rate, "mfu": mfu,
            }  # fmt: skip
            self.summary |= {key: line[key] for key in ("loss", "tokens_per_second", "mfu")}
            if self.log is not None:
                self.log.write(line)
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    raise RuntimeError(f"tfla: the {name} is {value} at step {step}; checkpoints before it are kept")
        self.pending.clear()
        if self.log is not None:
            self.log.flush()
        percent = "" if mfu is None else f", {100 * mfu:.1f} % of peak"
        self.progress.show(self.step, f"loss {self.summary['loss']:.4f}, {rate:,.0f} tokens/s{percent}")
        return bool(others[-1] > 0)

    def _evaluate(self) -> None:
        data = Dataset(self.data.directory, "validation", self.recipe.context)
        result = evaluate(self.model, data, batch=self.micro, max_rows=self.run.eval_rows, world=self.world)
        values = {f"validation_{name}": getattr(result, name) for name in ("loss", "perplexity", "bits_per_byte")}
        self.summary |= values
        if self.log is not None:
            self.log.write({"step": self.step, **values})
            self.log.flush()
        self.since = time.monotonic()


def _local_batch(recipe: Recipe, world: World) -> int:
    if recipe.batch % world.data_ranks:
        raise ValueError(
            f"tfla: batch is {recipe.batch}; it must be a multiple of the {world.data_ranks} ranks with data"
        )
    return recipe.batch // world.data_ranks


def resume_options(run: Path) -> tuple[ModelConfig, Recipe, Path] | None:
    """What the last checkpoint of a run was trained with."""
    last = checkpoint.latest(run)
    if last is None:
        return None
    meta = checkpoint.read_meta(last)
    return from_dict(ModelConfig, meta["model"]), from_dict(Recipe, meta["recipe"]), Path(meta["data_path"])
