"""Writing that survives a power cut: what a program has written may otherwise be in memory alone for half a minute."""

import os
import uuid
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is whole or absent, or as it was, whatever happens meanwhile, a power cut included.

    Args:
        path (`Path`): of the file, in an existing directory.
        content (`bytes`): all of it.

    Raises:
        `OSError`: it cannot be written; it is as it was.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "xb") as file:  # a new file: what a link of this name points to is never written
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory_to_disk(path.parent)  # the renaming too


def tree_to_disk(directory: Path) -> None:
    """Wait until all files below a directory, and their names, survive a power cut."""
    access = os.O_RDWR if os.name == "nt" else os.O_RDONLY
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync(os.path.join(folder, name), access)
        directory_to_disk(Path(folder))


def directory_to_disk(directory: Path) -> None:
    """Wait until the names in a directory survive a power cut; do nothing where directories cannot be opened."""
    if hasattr(os, "O_DIRECTORY"):
        _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str | Path, access: int) -> None:
    handle = os.open(path, access)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
