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


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds RUN/.lock. The file stays behind and says who held it last; only a living process blocks another."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = os.open(run / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise type(error)(f"tfla: {run} cannot be written: {error.strerror}") from None
    try:
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
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(handle)
