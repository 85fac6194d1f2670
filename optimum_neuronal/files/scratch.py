"""Temporary directories with a fixed name, so that the next process removes what a killed one has left."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_directory(place: Path, name: str) -> Iterator[Path]:
    """Yield an empty directory of this name, and remove it at the end. Two processes must not use the same name at once."""
    directory = place / name
    shutil.rmtree(directory, ignore_errors=True)  # left by a killed process
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
