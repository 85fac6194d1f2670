"""Temporary directories. What killed processes leave of them is removed by the next process that makes one."""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


LOCK, CONTENT = "lock", "files"  # what a temporary directory holds


@contextmanager
def scratch_directory(place: Path, stem: str) -> Iterator[Path]:
    """Yield an empty directory, which is removed when the context ends.

    It lies beside a lock, which the system releases when the process dies. What killed processes left is removed first.

    Args:
        place (`Path`): an existing directory.
        stem (`str`): beginning of the name; eight hexadecimal digits follow.

    Raises:
        `OSError`: the place cannot be written.
    """
    remove_left_over(place, stem)
    directory, lock = _make(place, stem)
    try:
        yield directory / CONTENT
    finally:
        lock.release()
        shutil.rmtree(directory, ignore_errors=True)


def _make(place: Path, stem: str) -> tuple[Path, FileLock]:
    """Return a new directory, and its lock, which is acquired."""
    while True:
        directory = place / f"{stem}-{uuid.uuid4().hex[:8]}"
        directory.mkdir()
        lock = FileLock(directory / LOCK)
        try:
            with suppress(FileNotFoundError):  # another process removed it before it was locked
                lock.acquire()
                (directory / CONTENT).mkdir()
                return directory, lock
        except BaseException:  # a full disk
            lock.release()
            shutil.rmtree(directory, ignore_errors=True)
            raise


def remove_left_over(place: Path, stem: str) -> None:
    """Remove the temporary directories that killed processes left in a place; directories in use stay."""
    pattern, found = re.compile(rf"{re.escape(stem)}-[0-9a-f]{{8}}"), []
    with suppress(OSError):
        found = [Path(entry.path) for entry in os.scandir(place) if pattern.fullmatch(entry.name)]
    for directory in found:
        if directory.is_dir() and not directory.is_symlink():
            with suppress(Timeout, OSError), FileLock(directory / LOCK, blocking=False):
                shutil.rmtree(directory, ignore_errors=True)
