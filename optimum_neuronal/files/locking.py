"""Locks what only one process and thread may write at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(file: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a file, which is created. Raise `BlockingIOError` with the text `busy` if another one holds it."""
    lock = FileLock(file, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(busy) from error
    try:
        yield
    finally:
        lock.release()
