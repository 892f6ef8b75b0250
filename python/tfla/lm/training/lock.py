"""One trainer per run: a lock that the kernel lets go of when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = ".lock"


def _open(run: Path) -> int:
    try:
        run.mkdir(parents=True, exist_ok=True)
        return os.open(run / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise type(error)(f"tfla: {run} cannot be written: {error.strerror}") from None


def _take(handle: int, run: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
        raise BlockingIOError(
            f"tfla: {run} is being trained by {holder}; wait for it, or train in another folder"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        print(f"tfla: {run} is on a file system without locks; train it once at a time", file=sys.stderr)


def _is_at(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _leaving_nothing(run: Path, made: list[Path], before: set[str]) -> Iterator[None]:
    """Around the work of the one that holds the lock: if it fails before it has written, what was made for it goes."""
    try:
        yield
    except BaseException:
        if made and set(os.listdir(run)) - before == {NAME}:
            with contextlib.suppress(OSError):  # a folder that another has put something into stays
                made[0].unlink()
                for folder in made[1:]:
                    folder.rmdir()
        raise


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds RUN/.lock. The file stays behind and says who held it last; only a living process blocks another."""
    # The lock and the folders around it that are not there yet, from the inside out.
    made = [path for path in (run / NAME, run, *run.parents) if not path.exists()]
    before = set(os.listdir(run)) if run.is_dir() else set()
    while True:
        handle = _open(run)
        try:
            _take(handle, run)
            if _is_at(handle, run / NAME):  # and was not removed between the two by one that has failed
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                with _leaving_nothing(run, made, before):
                    yield
                return
        finally:
            os.close(handle)
