"""Checkpoints of a run through torch.distributed.checkpoint.

RUN/step-00000500 holds the shards that all ranks wrote and checkpoint.json, written last: what the run is, and the size
and checksum of every file. A checkpoint is written under another name and renamed when it is complete and on disk, and
renamed again before it is removed: a save or a removal that is interrupted leaves the others as they were, and a folder
of that name is whole unless something else damaged it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zlib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tfla.lm.checks import bare_name
from tfla.lm.config import ModelConfig, Recipe
from tfla.lm.fields import Count, Range, check, from_dict, replace, to_dict
from tfla.lm.model import LanguageModel
from tfla.lm.training import storage
from tfla.lm.training.parallel import World

FORMAT, VERSION, META = "tfla.lm checkpoint", 1, "checkpoint.json"
TOKENIZER = "tokenizer.json"
NAME = re.compile(r"step-(\d{8})")
LEFT_OVER = re.compile(r"\.step-\d{8}\.(partial|removed)")
# What may differ between the run that saved and the one that goes on; all else would change the losses.
FREE = (
    "parallel", "context_parallel", "micro_batch", "checkpoint_activations", "keep_for_backward", "keep_budget_gb",
    "compile", "steps",
)  # fmt: skip
# What checkpoint.json holds, besides format, version and the fingerprint of the data.
_NUMBER = Annotated[int, Range(at_least=0)]
FIELDS: dict[str, Any] = {
    "step": _NUMBER, "model": dict[str, Any], "recipe": dict[str, Any], "data_path": str | None,
    "tokenizer": str | None, "eod": _NUMBER | None, "tokens": Count, "files": dict[str, dict[str, int]],
}  # fmt: skip

_T = TypeVar("_T")


def directory(run: Path, step: int) -> Path:
    return run / f"step-{step:08}"


def steps(run: Path) -> list[int]:
    """Of the checkpoints in a run, ascending."""
    matches = [NAME.fullmatch(path.name) for path in run.iterdir()] if run.is_dir() else []
    return sorted(int(match[1]) for match in matches if match)


def latest(run: Path) -> Path | None:
    found = steps(run)
    return directory(run, found[-1]) if found else None


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "rng": torch.get_rng_state()}


def _hidden(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}")


def _complete(partial: Path, target: Path, meta: dict[str, Any]) -> None:
    """checkpoint.json beside the shards, all of it on disk, then the name."""
    meta = dict(meta)
    tokenizer = meta.pop("tokenizer_json")
    if tokenizer is not None:
        (partial / meta["tokenizer"]).write_text(tokenizer)
    files = {}
    for file in sorted(partial.iterdir()):
        _sync(file)
        files[file.name] = {"bytes": file.stat().st_size, "crc32": _checksum(file)}
    (partial / META).write_text(json.dumps({**meta, "files": files}, indent=1) + "\n")
    _sync(partial / META)
    _sync(partial)
    if target.exists():
        target.rename(_hidden(target, "removed"))
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(_hidden(target, "removed"), ignore_errors=True)


def _write(state: dict[str, Any], target: Path, meta: dict[str, Any], world: World) -> None:
    """Every rank calls it: shards, then checkpoint.json, then the name."""
    partial = _hidden(target, "partial")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    try:
        world.from_first(begin)
        storage.save(state, partial)
        world.barrier()
        world.from_first(lambda: _complete(partial, target, meta))
    except OSError as error:
        if world.first:  # on a full disk its room is needed
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"tfla: {target} could not be saved: {error}; what was saved before is kept") from None


def _remove(path: Path) -> None:
    """By another name first: what is left of it when this is interrupted is no checkpoint."""
    gone = _hidden(path, "removed")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _prune(run: Path, keep: int) -> None:
    for old in steps(run)[:-keep]:
        _remove(directory(run, old))


def tidy(run: Path) -> None:
    """Removes what interrupted saves and removals left."""
    for path in run.iterdir() if run.is_dir() else ():
        if LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def save(
    run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any], world: World,
    *, keep: int = 2,
) -> Path:  # fmt: skip
    """Every rank calls it. about: what `describe` returns. Keeps the last `keep` checkpoints."""
    check("keep", Count, keep)
    target = directory(run, step)
    _write(_state(model, optimizer), target, {"format": FORMAT, "version": VERSION, "step": step, **about}, world)
    world.from_first(lambda: _prune(run, keep))
    return target


def save_model(path: Path, model: LanguageModel, about: dict[str, Any]) -> None:
    """A checkpoint of weights alone, such as an imported one: to evaluate, generate or begin a run from."""
    if path.exists():
        raise FileExistsError(f"tfla: {path} exists; give another folder, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"format": FORMAT, "version": VERSION, "step": 0, **about, "model": to_dict(model.config)}
    _write({"model": model.state_dict()}, path, meta, World())


def read_meta(path: Path) -> dict[str, Any]:
    """checkpoint.json of a checkpoint."""
    file = path / META
    if not path.is_dir():
        raise FileNotFoundError(f"tfla: {path} is not a checkpoint: there is no such folder")
    if not file.exists():
        raise ValueError(f"tfla: {path} is not a checkpoint of tfla.lm: it has no {META}")
    try:
        meta = json.loads(file.read_text())
    except (ValueError, RecursionError):
        raise ValueError(f"tfla: {file} is cut off or not JSON") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("version") != VERSION:
        raise ValueError(f"tfla: {file} is not {FORMAT!r} version {VERSION}")
    for name, kind in FIELDS.items():
        if name not in meta:
            raise ValueError(f"tfla: {file} has no {name}; the checkpoint is damaged")
        check(f"{name} of {file}", kind, meta[name])
    for name in (*meta["files"], *({meta["tokenizer"]} - {None})):
        bare_name(name, file)
    if meta["tokenizer"] not in (None, "bytes", *meta["files"]):
        raise ValueError(f"tfla: {file} names the tokenizer {meta['tokenizer']!r}, which is not among its files")
    return meta


def verify(path: Path) -> dict[str, Any]:
    """Refuses a checkpoint with a file that is missing, cut off or changed, by the file's name."""
    meta = read_meta(path)
    for name in (storage.METADATA, *meta["files"]):
        file, expected = path / name, meta["files"].get(name)
        if expected is None or expected.keys() != {"bytes", "crc32"}:
            raise ValueError(f"tfla: {path / META} has no size and checksum of {name}; the checkpoint is damaged")
        if not file.is_file():
            raise ValueError(f"tfla: {file} is missing; the checkpoint is not whole")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"tfla: {file} has {size} bytes of {expected['bytes']}; the checkpoint was cut off")
        try:
            changed = _checksum(file) != expected["crc32"]
        except OSError as error:
            raise ValueError(f"tfla: {file} cannot be read: {error.strerror}") from None
        if changed:
            raise ValueError(f"tfla: {file} does not have its checksum; the checkpoint is damaged")
    return meta


def none_whole(run: Path, reason: str) -> ValueError:
    return ValueError(f"tfla: {run} has no whole checkpoint to go on from: {reason.removeprefix('tfla: ')}")


def newest_whole(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint to go on from, None where there is none at all; and what is wrong with newer ones."""
    damaged: dict[Path, str] = {}
    for step in reversed(steps(run)):
        path = directory(run, step)
        try:
            verify(path)
        except ValueError as error:
            damaged[path] = str(error)
        else:
            return path, damaged
    if damaged:
        raise none_whole(run, next(iter(damaged.values())))
    return None, {}


def set_aside(path: Path, reason: str) -> None:
    """Keeps a damaged checkpoint under another name, so that its step can be saved again."""
    number, new = 1, path.with_name(f"{path.name}.damaged")
    while new.exists():
        number += 1
        new = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(new)
    print(f"{reason}; going on from the one before, this one is kept as {new.name}", file=sys.stderr)


def _refuse_other(path: Path, meta: dict[str, Any], about: dict[str, Any]) -> None:
    for part in ("model", "recipe"):
        ours, theirs = json.loads(json.dumps(about[part])), meta[part]
        if part == "model":
            _, theirs = ModelConfig.choose(theirs)
        # The kind first: fields that only one of two kinds has differ as well.
        for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name != "kind", name)):
            if ours.get(name) != theirs.get(name) and not (part == "recipe" and name in FREE):
                raise ValueError(
                    f"tfla: {path} was trained with {name} {theirs.get(name)!r}, this run has {ours.get(name)!r}; "
                    "resume with the same options or begin another run"
                )
    if about["recipe"]["steps"] < meta["step"]:
        done = meta["step"]
        raise ValueError(f"tfla: steps is {about['recipe']['steps']}; {path} has done {done}, and a run only grows")
    if meta.get("data") != about["data"]:
        raise ValueError(f"tfla: {path} was trained on another dataset than {about['data_path']}; resume with its own")


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]) -> dict[str, Any]:
    """Goes on where a checkpoint that is whole ended; every rank calls it. Returns its checkpoint.json."""
    meta = read_meta(path)
    _refuse_other(path, meta, about)
    state = _state(model, optimizer)
    storage.load(state, path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["rng"])
    return meta


def describe(model: ModelConfig, recipe: Recipe, data: Any) -> dict[str, Any]:
    """What checkpoint.json says of a run besides its step."""
    name = bare_name(data.meta["tokenizer"], data.directory)
    return {
        "model": to_dict(model),
        "recipe": to_dict(recipe),
        "data": data.fingerprint(),
        "data_path": os.path.abspath(data.directory),
        "tokenizer": "bytes" if name == "bytes" else TOKENIZER,
        "tokenizer_json": (data.directory / name).read_text() if name != "bytes" else None,
        "eod": data.eod,
        "tokens": data.vocab,
    }


def data_path(path: Path, meta: dict[str, Any], given: Path | None = None) -> Path:
    """The dataset of a checkpoint: where it was in training, unless it is given."""
    known = meta["data_path"]
    if given is None and known is None:
        raise ValueError(f"tfla: {path} does not say what it was trained on; give a dataset with --data")
    if given is None and not Path(known).is_dir():
        raise FileNotFoundError(f"tfla: {known}, the dataset of {path}, is not there; say with --data where it is")
    return Path(given or known)


def find(path: Path) -> Path:
    """A checkpoint, given itself or its run."""
    if NAME.fullmatch(path.name) or (path / META).exists():
        return path
    found = latest(path)
    if found is None:
        raise FileNotFoundError(f"tfla: {path} holds no checkpoint: neither {META} nor folders step-...")
    return found


def read_config(cls: type[_T], path: Path, values: dict[str, Any]) -> _T:
    """A part of checkpoint.json; what it refuses is said with the file's name."""
    try:
        return from_dict(cls, values)
    except ValueError as error:
        raise ValueError(f"tfla: {path / META}: {str(error).removeprefix('tfla: ')}") from None


def make_model(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    try:
        return LanguageModel(config, dtype)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in f"{error!r}".lower():
            raise
        size = f"{config.layers} layers of width {config.dim} with {config.vocab} tokens"
        raise ValueError(f"tfla: a model of {size} does not fit into the memory of this machine") from None


def load_weights(path: Path, model: LanguageModel) -> None:
    """The weights of a checkpoint into a model of the same config, before it is spread over ranks."""
    path = find(path)
    meta = verify(path)
    for name in ("kind", "layers", "dim", "heads", "vocab"):
        theirs, ours = meta["model"].get(name), getattr(model.config, name)
        if theirs is not None and theirs != ours:
            raise ValueError(f"tfla: {path} has {name} {theirs!r}, this run has {ours!r}; they must be equal")
    state = {"model": model.state_dict()}
    storage.load(state, path)
    model.load_state_dict(state["model"])


def load_model(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[LanguageModel, dict[str, Any]]:
    """The model of a checkpoint, on the CPU, and checkpoint.json; changes: fields of its config."""
    path = find(path)
    meta = read_meta(path)
    config = replace(read_config(ModelConfig, path, meta["model"]), changes)
    model = make_model(config, dtype)
    load_weights(path, model)
    return model, meta
