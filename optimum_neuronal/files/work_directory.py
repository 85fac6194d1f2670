"""The directory of an unfinished prune: one process uses it at a time, and at the end only what is its own is removed."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..system.notes import get_logger
from .directories import check_writable
from .journal import IDENTITY, LOCK, OWN_FILE, Journal
from .locking import acquired


logger = get_logger(__name__)


class WorkDirectory:
    """Where finished steps of a prune are recorded. Without a directory nothing is recorded.

    While the context lasts, nobody else can use it. A directory to which nothing was recorded is removed at the end.

    ```python
    with WorkDirectory("work") as folder:
        journal = folder.journal({"seed": 0})
        ...
        folder.remove()
    ```

    Args:
        directory (`str` or `Path`, *optional*): made if it does not exist.

    Raises:
        `ValueError`, `OSError`: it cannot be written, see [`check_writable`]; or
        `BlockingIOError`: another prune uses it; the message says which process.
    """

    def __init__(self, directory: str | Path | None = None):
        self.path = None if directory is None else check_writable(directory, "record in")
        self._lock: FileLock | None = None

    def __enter__(self) -> "WorkDirectory":
        if self.path is not None:
            self._lock = acquired(self.path / LOCK)
        return self

    def __exit__(self, *_) -> None:
        if self.path is not None and not (self.path / IDENTITY).exists():
            self.remove()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def journal(self, identity: Mapping[str, Any]) -> Journal:
        """What was recorded there, see [`Journal`] for what is raised."""
        return Journal(self.path, identity)

    def remove(self) -> None:
        """Removes the records, and the directory, unless it holds something else, is a link or the working directory.

        What cannot be removed is warned of: the work is done, and nothing of it is lost.
        """
        if self.path is None or not self.path.is_dir():
            return
        try:
            entries = sorted(os.scandir(self.path), key=lambda entry: entry.name == LOCK)  # the lock last
            for entry in entries:
                if OWN_FILE.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
        except OSError as error:
            logger.warning(f"What is left of the finished prune in {self.path} could not be removed: {error}")
        if not self.path.samefile(os.curdir):
            with suppress(OSError):  # it holds something else, is a link, or its parent may not be written
                self.path.rmdir()
