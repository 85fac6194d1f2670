"""Locks that the system releases when a process dies, however it dies: none is ever stale."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def locked(directory: Path) -> Iterator[bool | None]:
    """Holds a directory's lock while the context lasts.

    Yields whether it was free; None where directories cannot be locked, so that nobody knows.
    """
    handle, free = None, None
    try:
        if fcntl is not None:
            with suppress(OSError):
                handle = os.open(directory, os.O_RDONLY)
                free = _lock(handle)
        yield free
    finally:
        if handle is not None:
            os.close(handle)


def hold(file: Path) -> int | None:
    """Takes the lock of a file, which tells who holds it. The file and its directory are made if they do not exist.

    Returns:
        `int`, *optional*: what [`let_go`] is to be given; None where the system or the disk knows no locks.

    Raises:
        `BlockingIOError`: it is held; the message says by whom.
    """
    if fcntl is None:
        return None
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # what a link names is not ours
        except FileNotFoundError:
            continue  # its last holder has just removed the directory
        try:
            if not _lock(handle):
                holder = os.read(handle, 200).decode(errors="replace").strip()
                raise BlockingIOError(
                    f"{file.parent} is in use by {holder or 'another process'}: wait for it to end, or choose another."
                )
            if _is_at(handle, file):
                _sign(handle)
                return handle
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:
            os.close(handle)
            return None
        os.close(handle)  # its last holder has just removed it: another process may have made it anew


def let_go(handle: int | None) -> None:
    """Releases what [`hold`] has taken."""
    if handle is not None:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    return False


def _sign(handle: int) -> None:
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
