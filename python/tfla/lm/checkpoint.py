"""Checkpoints of a run through torch.distributed.checkpoint.

RUN/step-00000500 holds the shards that all ranks wrote and checkpoint.json, written last: what the run is, and the size
and checksum of every file. A checkpoint is written under another name and renamed when it is complete and on disk, so
a save that is interrupted leaves the one before as it was, and a folder of that name is always whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tfla.lm.config import ModelConfig, Recipe
from tfla.lm.fields import from_dict, to_dict
from tfla.lm.model import LanguageModel
from tfla.lm.parallel import World

FORMAT, VERSION, META = "tfla.lm checkpoint", 1, "checkpoint.json"
NAME = re.compile(r"step-(\d{8})")
# What may differ between the run that saved and the one that goes on; all else would change the losses.
FREE = ("parallel", "context_parallel", "micro_batch", "checkpoint_activations", "compile")


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


def _write(state: dict[str, Any], target: Path, meta: dict[str, Any], world: World) -> None:
    """Every rank calls it: shards, then checkpoint.json, then the name."""
    partial = target.with_name(f".{target.name}.partial")
    if world.first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it saves without a process group, when there is one process
        dcp.save(state, checkpoint_id=partial)
    world.barrier()
    if not world.first:
        return
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
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _sync(target.parent)


def save(
    run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any], world: World,
    *, keep: int = 2,
) -> Path:  # fmt: skip
    """Every rank calls it. about: what `describe` returns. Keeps the last `keep` checkpoints."""
    target = directory(run, step)
    _write(_state(model, optimizer), target, {"format": FORMAT, "version": VERSION, "step": step, **about}, world)
    if world.first:
        for old in steps(run)[:-keep]:
            shutil.rmtree(directory(run, old))
    world.barrier()
    return target


def save_model(path: Path, model: LanguageModel, about: dict[str, Any]) -> None:
    """A checkpoint of weights alone, such as an imported one: to evaluate, generate or begin a run from."""
    if path.exists():
        raise FileExistsError(f"tfla: {path} exists; give another folder, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"format": FORMAT, "version": VERSION, "step": 0, **about, "model": to_dict(model.config)}
    _write({"model": model.state_dict()}, path, meta, World())


def read_meta(path: Path) -> dict[str, Any]:
    """checkpoint.json of a checkpoint, or of the last one of a run."""
    if not path.is_dir():
        raise FileNotFoundError(f"tfla: {path} is not a checkpoint: there is no such folder")
    if not (path / META).exists():
        raise ValueError(f"tfla: {path} is not a checkpoint of tfla.lm: it has no {META}")
    try:
        meta = json.loads((path / META).read_text())
    except ValueError:
        raise ValueError(f"tfla: {path / META} is cut off or not JSON; use an earlier checkpoint") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("version") != VERSION:
        raise ValueError(f"tfla: {path / META} is not {FORMAT!r} version {VERSION}")
    return meta


def verify(path: Path) -> dict[str, Any]:
    """Refuses a checkpoint with a file that is missing, cut off or changed, by the file's name."""
    meta = read_meta(path)
    for name, expected in meta["files"].items():
        file = path / name
        if not file.exists():
            raise ValueError(f"tfla: {file} is missing; the checkpoint is not whole, use an earlier one")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise ValueError(
                f"tfla: {file} has {size} bytes of {expected['bytes']}; the checkpoint was cut off, use an earlier one"
            )
        if _checksum(file) != expected["crc32"]:
            raise ValueError(f"tfla: {file} does not have its checksum; the checkpoint is damaged, use an earlier one")
    return meta


def _refuse_other(path: Path, meta: dict[str, Any], about: dict[str, Any]) -> None:
    for part in ("model", "recipe"):
        ours, theirs = json.loads(json.dumps(about[part])), meta[part]
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name) and not (part == "recipe" and name in FREE):
                raise ValueError(
                    f"tfla: {path} was trained with {name} {theirs.get(name)!r}, this run has {ours.get(name)!r}; "
                    "resume with the same options or begin another run"
                )
    if meta["data"] != about["data"]:
        raise ValueError(f"tfla: {path} was trained on another dataset than {about['data_path']}; resume with its own")


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any], world: World) -> int:
    """Goes on where a checkpoint ended; returns its step."""
    meta = verify(path) if world.first else read_meta(path)
    _refuse_other(path, meta, about)
    state = _state(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["rng"])
    return meta["step"]


def describe(model: ModelConfig, recipe: Recipe, data: Any) -> dict[str, Any]:
    """What checkpoint.json says of a run besides its step."""
    name = data.meta["tokenizer"]
    return {
        "model": to_dict(model),
        "recipe": to_dict(recipe),
        "data": data.fingerprint(),
        "data_path": str(data.directory),
        "tokenizer": name,
        "tokenizer_json": (data.directory / name).read_text() if name != "bytes" else None,
        "eod": data.eod,
        "tokens": data.vocab,
    }


def find(path: Path) -> Path:
    """A checkpoint, given itself or its run."""
    if NAME.fullmatch(path.name) or (path / META).exists():
        return path
    found = latest(path)
    if found is None:
        raise FileNotFoundError(f"tfla: {path} holds no checkpoint: neither {META} nor folders step-...")
    return found


def load_weights(path: Path, model: LanguageModel) -> None:
    """The weights of a checkpoint into a model of the same config, before it is spread over ranks."""
    path = find(path)
    meta = verify(path)
    for name in ("kind", "layers", "dim", "heads", "vocab"):
        if meta["model"][name] != getattr(model.config, name):
            theirs, ours = meta["model"][name], getattr(model.config, name)
            raise ValueError(f"tfla: {path} has {name} {theirs!r}, this run has {ours!r}; they must be equal")
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])


def load_model(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[LanguageModel, dict[str, Any]]:
    """The model of a checkpoint, on the CPU, and checkpoint.json; changes: fields of its config."""
    path = find(path)
    meta = read_meta(path)
    model = LanguageModel(from_dict(ModelConfig, {**meta["model"], **changes}), dtype)
    load_weights(path, model)
    return model, meta
