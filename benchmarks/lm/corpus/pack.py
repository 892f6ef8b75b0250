"""The dataset as one small file that travels to where the models are trained, and back to a folder."""

from __future__ import annotations

import hashlib
import lzma
import tarfile
from pathlib import Path

MANIFEST = "corpus.json"
# Two bytes a token: positions and contexts of the coder go by pairs.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 7, "dict_size": 2**26, "lc": 2, "lp": 1, "pb": 1}]


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs from machine to machine."""
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, 0, "", "", 0o644
    return entry


def pack(dataset: Path, out: Path) -> None:
    partial = out.with_name(f".{out.name}.partial")
    with lzma.open(partial, "wb", filters=FILTERS) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for file in sorted(dataset.iterdir()):
            archive.add(file, file.name, filter=_plain)
    partial.replace(out)


def unpack(packed: Path, out: Path) -> None:
    """Into a folder that does not exist yet. Names that lead out of it are refused."""
    if out.exists():
        raise FileExistsError(f"tfla: {out} exists; give another folder, or remove it")
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with lzma.open(packed) as stream, tarfile.open(fileobj=stream) as archive:
        for entry in archive:
            if not entry.isfile() or Path(entry.name).name != entry.name:
                raise ValueError(f"tfla: {packed} has an entry {entry.name!r}; a corpus holds plain files alone")
            source = archive.extractfile(entry)
            assert source is not None
            (partial / entry.name).write_bytes(source.read())
    partial.replace(out)
