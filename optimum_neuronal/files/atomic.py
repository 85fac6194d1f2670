"""Writes a file whole or not at all, and makes directories for temporary files."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_directory(place: Path, name: str) -> Iterator[Path]:
    """Yield an empty directory of this name, and remove it at the end. Only one process may use a name at a time.

    The name is fixed, so that the next process removes what a killed one has left.
    """
    directory = place / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in an existing directory. After an error it is absent or unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several processes may write the same file
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # The error of a full disk does not name a file.
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
