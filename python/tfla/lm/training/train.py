"""The training loop: the paper's recipe on one process or many, stopped and resumed at any step."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tfla.lm.config import ModelConfig, Recipe
from tfla.lm.data import Dataset, Order
from tfla.lm.evaluate import evaluate
from tfla.lm.fields import Count, Positive, check_fields, option
from tfla.lm.model import check_device, check_shares_sequences
from tfla.lm.models.base import Rows
from tfla.lm.training import checkpoint
from tfla.lm.training.keeping import keep_for_backward
from tfla.lm.training.lock import locked
from tfla.lm.training.metrics import Log, Progress, Utilisation, flops_per_token, peak_flops
from tfla.lm.training.optimizer import learning_rate, make_optimizer
from tfla.lm.training.parallel import World, gradients, join, spread, total_norm, unwrapped


@dataclass(frozen=True)
class Run:
    """Where a run lives and what it reports; nothing of it changes a loss."""

    directory: Path = option("folder of checkpoints and logs: the run", flag="out", unit="RUN")
    log_every: Count = option("between looks at the losses, which are then logged", 10, unit="STEPS")
    save_every: Count | None = option(
        "between checkpoints; none: no checkpoint at all, for measurements", 500, unit="STEPS"
    )
    eval_every: Count | None = option("evaluate on the validation split", None, unit="STEPS")
    eval_rows: Count | None = option("rows of it; none: all", None)
    keep: Count = option("checkpoints kept", 2)
    stop_after: Count | None = option("save and stop there, as a signal would", None, unit="STEP")
    time_limit: Positive | None = option("save and stop then", None, unit="SECONDS")
    device: str | None = option("cpu or cuda; without it cuda where there is one", None)
    tensorboard: bool = option("also write RUN/tensorboard", True)
    progress: bool = option("a line of progress", True)
    peak: Positive | None = option("of one device, for the utilisation", None, flag="peak-flops", unit="FLOPS")
    begin_from: Path | None = option("a checkpoint whose weights a new run begins with", None)

    def __post_init__(self) -> None:
        check_fields(self)


class Stop:
    """Set by SIGINT, SIGTERM and SIGHUP; the loop ends after its step. A second signal ends the process as usual.

    One that is ignored, as nohup ignores SIGHUP, stays ignored.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
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
        trainer = _Trainer(config, recipe, data_path, run, world)
        with contextlib.ExitStack() as stack:
            world.from_first(lambda: stack.enter_context(locked(run.directory)))
            summary = trainer.train()
        return summary
    finally:
        world.close(together=summary is not None)


class _Trainer:
    def __init__(self, config: ModelConfig, recipe: Recipe, data_path: Path, run: Run, world: World) -> None:
        """Refuses what cannot be trained, before anything is written."""
        self.config, self.recipe, self.run, self.world = config, recipe, run, world
        check_device(config, world.device)
        if recipe.context_parallel > 1:
            check_shares_sequences(config)
        if recipe.batch % world.data_ranks:
            raise ValueError(
                f"tfla: batch is {recipe.batch}; it must be a multiple of the {world.data_ranks} ranks with data"
            )
        self.local = recipe.batch // world.data_ranks
        self.micro = min(recipe.micro_batch or self.local, self.local)
        if self.local % self.micro:
            raise ValueError(f"tfla: micro_batch is {self.micro}; it must divide the {self.local} sequences of a rank")
        self.data = Dataset(data_path, "train", recipe.context)
        self.data.verify()
        if self.data.vocab > config.vocab:
            raise ValueError(f"tfla: vocab is {config.vocab}; {data_path} has {self.data.vocab} tokens")
        if run.eval_every and Dataset(data_path, "validation", recipe.context).rows == 0:
            raise ValueError(
                f"tfla: eval_every is {run.eval_every}; split 'validation' of {data_path} is empty, so leave it out "
                "or prepare the data with one"
            )
        self.order = Order(self.data.whole_rows, recipe.seed)
        self.about = checkpoint.describe(config, recipe, self.data)

    def _begin(self) -> None:
        """Model and optimizer as the last checkpoint that is whole left them, or new ones."""
        recipe, run, world = self.recipe, self.run, self.world
        last, damaged = world.from_first(lambda: checkpoint.newest_whole(run.directory))
        torch.manual_seed(recipe.seed)
        dtype = recipe.dtype or ("bfloat16" if world.device.type == "cuda" else "float32")
        model = checkpoint.make_model(self.config, getattr(torch, dtype)).to(world.device)
        if last is None and run.begin_from is not None:
            checkpoint.load_weights(run.begin_from, model)
        keep_for_backward(model, recipe, world, self._rows())
        self.model: nn.Module = spread(model, recipe, world)
        self.optimizer = make_optimizer(self.model, recipe)
        self.flops = flops_per_token(self.config, recipe.context)
        self.step, self.before = 0, recipe.steps  # steps that the run was to have
        if last is not None:
            meta = checkpoint.load(last, self.model, self.optimizer, self.about)
            self.step, self.before = meta["step"], meta["recipe"].get("steps", recipe.steps)
        world.from_first(lambda: self._clear(damaged))

    def _rows(self) -> Rows:
        """What a layer is given at a time. Rows that ranks share are not laid end to end."""
        if self.world.context_ranks > 1:
            return Rows(self.micro, self.recipe.context // self.world.context_ranks)
        return Rows(self.micro, self.recipe.context, self.data.sequences(self.micro))

    def _clear(self, damaged: dict[Path, str]) -> None:
        """Out of the way of this run: damaged checkpoints after the one it goes on from, and left-over folders."""
        for path, reason in damaged.items():
            checkpoint.set_aside(path, reason)
        checkpoint.tidy(self.run.directory)

    def train(self) -> dict[str, Any]:
        run, world = self.run, self.world
        self._begin()
        self.log = Log(run.directory, self.step, run.tensorboard) if world.first else None
        self.progress = Progress(self.recipe.steps, run.progress and world.first)
        self.utilisation = Utilisation(run.peak or (peak_flops(world.device) if world.first else None))
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.summary: dict[str, Any] = {"steps": self.recipe.steps, "begun_at": self.step}
        try:
            self._report_schedule()
            self._loop()
        finally:
            self.progress.close()
            if self.log is not None:
                self.log.close()
        return self.summary

    def _report_schedule(self) -> None:
        if self.log is None or self.before == self.recipe.steps:
            return
        steps = self.recipe.steps
        self.log.write({"step": self.step + 1, "steps": steps, "steps_before": self.before})
        print(
            f"tfla: {self.run.directory} was to have {self.before} steps and now has {steps}: "
            f"from step {self.step + 1} on the learning rate is that of a run of {steps}",
            file=sys.stderr,
        )

    def _loop(self) -> None:
        run, recipe, world = self.run, self.recipe, self.world
        saved = self.step
        begin = self.since = time.monotonic()
        last = min(recipe.steps, run.stop_after or recipe.steps)
        with Stop() as stop:
            stopped = self.step >= last
            while not stopped:
                self._update()
                done = self.step >= recipe.steps
                late = run.time_limit is not None and time.monotonic() - begin > run.time_limit
                stopped = self.step >= last or ((stop.asked or late) and world.ranks == 1)
                saving = run.save_every is not None and self.step % run.save_every == 0
                if self.step % run.log_every == 0 or saving or stopped:  # what is saved is logged, and is finite
                    stopped = self._flush(stop.asked or late) or stopped
                # Before anything else that may fail.
                if saving or (stopped and run.save_every is not None):
                    checkpoint.save(
                        run.directory, self.step, self.model, self.optimizer, self.about, world, keep=run.keep
                    )
                    saved = self.step
                    self.since = time.monotonic()
                # A run that its time limit ends is to be judged as well; one that a signal ends has no time for that.
                over = done or (late and world.ranks == 1)
                if run.eval_every and (self.step % run.eval_every == 0 or over):
                    self._evaluate()
        self.summary |= {"step": self.step, "finished": self.step >= recipe.steps, "seconds": time.monotonic() - begin}
        self.summary["checkpoint"] = str(checkpoint.directory(run.directory, saved)) if run.save_every else None

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
        mfu = self.utilisation.of(rate * self.flops / world.ranks)
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


def resume_options(run: Path, data: Path | None = None) -> tuple[ModelConfig, Recipe, Path] | None:
    """What the last checkpoint of a run was trained with; data: where its dataset is now, if it has moved."""
    found, reasons = checkpoint.steps(run), []
    for step in reversed(found):
        path = checkpoint.directory(run, step)
        try:
            meta = checkpoint.read_meta(path)
        except (ValueError, FileNotFoundError) as error:
            reasons.append(str(error))
            continue
        config = checkpoint.read_config(ModelConfig, path, meta["model"])
        recipe = checkpoint.read_config(Recipe, path, meta["recipe"])
        return config, recipe, checkpoint.data_path(path, meta, data)
    if reasons and checkpoint.steps(run) != found:  # another trainer has replaced them meanwhile
        return resume_options(run, data)
    if reasons:
        raise checkpoint.none_whole(run, reasons[0])
    return None
