"""Writes a file, or the files of a directory, whole or not at all.

New files are written under a temporary name on the same disk, then renamed by `os.replace`. A process that is killed
leaves the old files, the new ones, or a directory without the file that makes it a model.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .locking import locked


STAGING = ".saving"  # end of the temporary directory's name
REPLACED = ".replaced"  # folder in it for the old files, until all new ones are in their place


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


@contextmanager
def removed_at_the_end(file: Path) -> Iterator[None]:
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def replaced_directory(directory: str | Path, belongs: Callable[[str], bool], last: str) -> Iterator[Path]:
    """Yield an empty temporary folder, and move its files into the directory when the block ends without an exception.

    Old files whose name `belongs` are removed. The file `last`, without which the directory is not a model, is moved last.
    Raise `BlockingIOError` if another process or thread is doing so at the same time.
    """
    path = Path(os.path.realpath(directory))
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    place, name = (path.parent, f".{path.name}{STAGING}") if is_new else (path, STAGING)
    lock = place / f"{name}.lock"
    with (
        locked(lock, f"Another process or thread is saving to {path}: let only one of them save."),
        removed_at_the_end(lock),
        scratch_directory(place, name) as staging,
    ):
        yield staging
        mode = staging.stat().st_mode & 0o666  # of a new file: safetensors writes files that only their user can read
        for file in filter(Path.is_file, staging.rglob("*")):
            file.chmod(mode)
        if not path.exists():
            lock.unlink()  # a later save, to the directory that then exists, has its lock elsewhere
            staging.rename(path)
        else:
            _move_files(staging, path, belongs, last)


def _move_files(staging: Path, path: Path, belongs: Callable[[str], bool], last: str) -> None:
    """Put new files in the place of old ones. If one cannot be moved, all old files come back."""
    files = (file.relative_to(staging) for file in staging.rglob("*") if not file.is_dir())
    new = sorted(files, key=lambda file: (file == Path(last), file))
    for file in new:
        if (path / file).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path / file))
    with os.scandir(path) as entries:
        removed = {Path(e.name) for e in entries if e.is_file() and (e.name == last or belongs(e.name))}
    old = removed.union(file for file in new if os.path.lexists(path / file))
    moves = [(path / file, staging / REPLACED / file) for file in sorted(old, key=lambda file: file != Path(last))]
    moves += [(staging / file, path / file) for file in new]
    try:
        for place, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(place, target)
    except BaseException:
        for place, target in reversed(moves):
            if os.path.lexists(target) and not os.path.lexists(place):
                os.replace(target, place)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in an existing directory. After an error it is absent or unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several processes may write the same file
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error  # a full disk names no file
