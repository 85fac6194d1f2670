"""Temporary directories of which killed processes leave nothing for long: the next one removes what they have left."""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .locking import locked


@contextmanager
def scratch_directory(place: Path, stem: str) -> Iterator[Path]:
    """Yields an empty directory, which is removed when the context ends. First, what killed processes have left.

    Args:
        place (`Path`): an existing directory, in which it is made.
        stem (`str`): what its name begins with; eight hexadecimal digits follow.

    Raises:
        `OSError`: the place cannot be written.
    """
    for directory in left_over(place, stem):
        with locked(directory) as free:
            if free:
                shutil.rmtree(directory, ignore_errors=True)
    while True:
        directory = free_name(place, stem)
        directory.mkdir()
        with locked(directory) as free:
            if free is False or not directory.exists():
                continue  # taken for a left-over before it was locked
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            return


def free_name(place: Path, stem: str) -> Path:
    """A name that nothing has yet."""
    return place / f"{stem}-{uuid.uuid4().hex[:8]}"


def left_over(place: Path, stem: str) -> list[Path]:
    """Directories of such names: in use, or left by killed processes. No other name is ever told."""
    pattern = re.compile(rf"{re.escape(stem)}-[0-9a-f]{{8}}")
    with suppress(PermissionError):
        found = [entry.path for entry in list(os.scandir(place)) if pattern.fullmatch(entry.name)]
        return [Path(entry) for entry in found if os.path.isdir(entry) and not os.path.islink(entry)]
    return []
