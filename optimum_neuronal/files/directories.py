"""Checks a directory before anything is written to it."""

import os
from pathlib import Path


def check_writable(directory: str | Path, purpose: str) -> Path:
    """Return the absolute path of a directory that can be written or created. `purpose`: for errors, such as `"save to"`."""
    if not os.fspath(directory):
        raise ValueError(
            f"The path of the directory to {purpose} is empty: expected a path, such as '.' for this folder."
        )
    path = Path(os.path.abspath(directory))
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not existing.is_dir():
        raise NotADirectoryError(f"Cannot {purpose} {directory}: {existing} is a file. Choose another directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"Cannot {purpose} {directory}: no permission to write in {existing}.")
    return path


def leads_out(file: Path, folder: Path) -> bool:
    """Return True if a file of a checkpoint is a link to one outside its folder. The Hub's cache keeps them in `blobs`."""
    real, home = file.resolve(), folder.resolve()
    return not (real.is_relative_to(home) or real.is_relative_to(home.parent.parent / "blobs"))


def is_same(one: str | Path, other: str | Path) -> bool:
    """Return True if two paths lead to the same place, existing or not."""
    return os.path.realpath(one) == os.path.realpath(other)
