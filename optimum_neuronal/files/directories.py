"""Checks a directory before anything is written to it."""

import os
from contextlib import suppress
from pathlib import Path

from ..common.validation import check_path


def check_writable(directory: str | Path, purpose: str) -> Path:
    """Return the absolute path of a directory that can be written, or made; create nothing.

    Args:
        directory (`str` or `Path`): may exist or not.
        purpose (`str`): for messages: `"save to"`.

    Raises:
        `ValueError`: the name is empty, holds a NUL, or is not UTF-8, which files of weights cannot be written under.
        `NotADirectoryError`: the path, or one of its parents, is a file.
        `PermissionError`: the directory, or the one it would be made in, cannot be written.
        `OSError`: the name is too long.
    """
    if directory == "":
        raise ValueError(f"Cannot {purpose} '': the name is empty. Name a directory, or '.' for this one.")
    path = Path(check_path(f"the directory to {purpose}", directory)).absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Cannot {purpose} {os.fsencode(path)!r}: the name is not UTF-8. Choose another directory."
        ) from error
    if "\0" in str(path):
        raise ValueError(f"Cannot {purpose} {str(path)!r}: a name cannot hold a NUL. Choose another directory.")
    existing = nearest_existing(path)
    if not existing.is_dir():
        raise NotADirectoryError(f"Cannot {purpose} {directory}: {existing} is a file. Choose another directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"Cannot {purpose} {directory}: no permission to write in {existing}.")
    with suppress(FileNotFoundError):
        path.lstat()  # a name that is too long
    return path


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists."""
    for parent in (path, *path.parents):
        with suppress(OSError):  # a name that is too long, or a folder that may not be searched
            if os.path.lexists(parent) and parent.exists():
                return parent
    return Path(path.anchor)


def is_same(one: str | Path, other: str | Path) -> bool:
    """Return True if two paths lead to one place, by whatever links; neither need exist."""
    return os.path.realpath(one) == os.path.realpath(other)


def check_apart(work_dir: str | Path, output: str | Path) -> None:
    """Raise `ValueError` if a work directory and an output directory are one, or one lies in the other.

    The output is replaced as a whole, and the work directory is removed.
    """
    work, out = (Path(os.path.realpath(directory)) for directory in (work_dir, output))
    if work == out or work in out.parents or out in work.parents:
        how = "is also" if work == out else "lies within" if out in work.parents else "holds"
        raise ValueError(
            f"The work directory {work_dir} {how} the output {output}: name another, for it is removed at the end."
        )
