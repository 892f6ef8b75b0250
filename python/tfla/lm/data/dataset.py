"""Token datasets, memory-mapped, and the batches of a training run.

A dataset is a folder: dataset.json, shards of plain little-endian tokens per split, and the tokenizer.json if there
is one. A split is one stream of documents, each followed by the end-of-document token (EOD). A row of context T is a
stretch of T tokens of it as targets; inputs are the row shifted by one with EOD first, so a document begins where the
input is EOD.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tfla.lm.checks import check_positive
from tfla.lm.data.description import META, check_sizes, read_meta, verify
from tfla.lm.models.layers import Documents
from tfla.lm.training.loss import IGNORED


class Batch(NamedTuple):
    inputs: Tensor  # (B,T) int64
    targets: Tensor  # (B,T) int64; -1 does not count
    documents: Documents

    def to(self, device: torch.device | str) -> Batch:
        """On a GPU without waiting for it."""

        def move(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return (x.pin_memory() if torch.device(device).type == "cuda" else x).to(device, non_blocking=True)

        documents = Documents(*map(move, self.documents))
        return Batch(move(self.inputs), move(self.targets), documents)

    def stretch(self, rank: int, ranks: int) -> Batch:
        """This rank's part of every row, for context parallel."""
        width = self.inputs.shape[1] // ranks
        columns = slice(rank * width, (rank + 1) * width)
        inputs, targets, starts = (x[:, columns] for x in (self.inputs, self.targets, self.documents.starts))
        return Batch(inputs, targets, Documents(starts))


def entries_for(documents: int) -> int:
    entries = 64
    while entries < documents + 1:
        entries *= 2
    return entries


def boundaries(starts: Tensor) -> Tensor:
    """cu_seqlens over the flattened rows, filled up to a power of two with empty sequences: few different shapes."""
    flat = starts.flatten()
    begins = flat.nonzero()[:, 0]
    result = torch.full((entries_for(begins.numel()),), flat.numel(), dtype=torch.int32)
    result[: begins.numel()] = begins.int()
    return result


def make_batch(targets: Tensor, eod: int) -> Batch:
    """targets (B,T), with -1 after the end of the stream."""
    inputs = torch.full_like(targets, eod)
    inputs[:, 1:] = targets[:, :-1]
    starts = inputs == eod
    inputs[inputs == IGNORED] = eod
    return Batch(inputs, targets, Documents(starts, boundaries(starts)))


class Dataset:
    """One split of a dataset as rows of `context` targets."""

    def __init__(self, directory: str | Path, split: str, context: int) -> None:
        check_positive("context", context)
        self.directory, self.split, self.context = Path(directory), split, context
        self.meta = read_meta(self.directory)
        if split not in self.meta["splits"]:
            raise ValueError(f"tfla: split is {split!r}; {directory} has {' and '.join(self.meta['splits'])}")
        self.eod, self.vocab = self.meta["eod"], self.meta["vocab"]
        check_sizes(self.directory, self.meta, split)
        self._files = [self.directory / shard["file"] for shard in self.meta["splits"][split]["shards"]]
        self._shards = [np.memmap(file, dtype=self.meta["dtype"], mode="r") for file in self._files]
        self._verified = False
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        self.tokens = int(self._ends[-1]) if self._shards else 0
        self.whole_rows = self.tokens // context
        self.rows = -(-self.tokens // context)

    def bytes_per_token(self) -> float:
        summary = self.meta["splits"][self.split]
        return summary["bytes"] / summary["tokens"]

    def sequences(self, rows: int) -> int:
        """Of rows laid end to end, in a batch with as many documents as the split has on average."""
        summary = self.meta["splits"][self.split]
        documents = summary.get("documents")  # not needed for anything else, so not checked
        count = documents if isinstance(documents, int) and 0 <= documents <= self.tokens else 0
        begun = -(-rows * self.context * count // max(self.tokens, 1))
        return entries_for(rows + begun) - 1

    def fingerprint(self) -> int:
        """Tells datasets apart, by the checksums of their shards as well: a run is resumed on its own."""
        return zlib.crc32((self.directory / META).read_bytes())

    def verify(self) -> None:
        """Refuses shards that do not have their checksum. The first read does it; ranks share the files."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # A run that trains for hours before it reads the other splits is to know of their damage now.
        splits = list(self.meta["splits"]) if self.split == "train" else [self.split]
        verify(self.directory, self.meta, splits, rank, ranks)
        self._verified = True

    def stream(self, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of the split, across shards."""
        if not self._verified:
            self.verify()
        parts = []
        shard = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            offset = begin - (int(self._ends[shard - 1]) if shard else 0)
            part = self._shards[shard][offset : offset + end - begin]
            largest = int(part.max())
            if largest >= self.vocab:  # an index out of bounds far from here, and on a GPU the end of the process
                raise ValueError(
                    f"tfla: {self._files[shard]} has a token {largest}; {META} says that tokens are below "
                    f"{self.vocab}: the dataset is damaged, prepare it again"
                )
            parts.append(part)
            begin += len(part)
            shard += 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The last row of the split may be short; what it lacks does not count."""
        targets = np.full((len(rows), self.context), IGNORED, dtype=np.int64)
        for slot, row in enumerate(rows):
            part = self.stream(row * self.context, min((row + 1) * self.context, self.tokens))
            targets[slot, : len(part)] = part
        return make_batch(torch.from_numpy(targets), self.eod)


class Order:
    """Which rows a step takes: every epoch a new permutation. It depends on seed and step alone."""

    def __init__(self, rows: int, seed: int) -> None:
        if rows == 0:
            raise ValueError("tfla: data has not one row of context tokens to train on; lower context or add text")
        self.rows, self.seed = rows, seed
        self._epoch, self._permutation = -1, torch.empty(0)

    def row(self, number: int) -> int:
        epoch, place = divmod(number, self.rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**64)
            self._epoch, self._permutation = epoch, torch.randperm(self.rows, generator=generator)
        return int(self._permutation[place])
