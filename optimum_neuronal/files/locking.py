"""A lock on a file that names its holder. The system releases it when the holder dies."""

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout


NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)  # what disks without locks answer


def acquired(file: Path) -> FileLock:
    """Return the acquired lock of a file; nothing is locked where the disk has no locks.

    The file and its directory are made if they do not exist.

    Raises:
        `BlockingIOError`: another process holds it; the message names the process.
        `OSError`: the file cannot be made, or is a symbolic link.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, blocking=False, thread_local=False)
    try:
        lock.acquire()
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout as error:
        holder = ""
        with suppress(OSError):
            holder = file.read_text(encoding="utf-8", errors="replace")[:200].strip()
        raise BlockingIOError(
            f"{file.parent} is in use by {holder or 'another process'}: wait for it to end, or choose another directory."
        ) from error
    except OSError as error:
        if error.errno not in (*NO_LOCKS, errno.ENOSPC):  # a full disk: the lock holds without a name
            raise
    return lock
