"""Writes a file, or the files of a directory, whole or not at all.

New files are written under a temporary name on the same disk, then renamed by `os.replace`. A process that is killed
leaves the old files, the new ones, or a directory without the file that makes it a model. [`finish_moves`] then completes
the save.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..common.notes import get_logger
from .locking import locked


logger = get_logger(__name__)

STAGING = ".saving"  # end of the temporary directory's name
REPLACED = ".replaced"  # folder in it for the old files, until all new ones are in their place
MOVES = ".moves.json"  # file in it with the names of old and new files, while they are moved

Moves = list[tuple[Path, Path]]  # where a file is, where it goes; the old files first


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
        if not (directory / MOVES).exists():  # else it holds files that could be moved neither forward nor back
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def replaced_directory(directory: str | Path, old: Iterable[str], last: str) -> Iterator[Path]:
    """Yield an empty temporary folder, and move its files into the directory when the block ends without an exception.

    Files that match the patterns `old` are removed. The file `last`, without which the directory is not a model, is moved last.
    Raise `BlockingIOError` if another process or thread is doing so at the same time.
    """
    path = Path(os.path.realpath(directory))
    path.parent.mkdir(parents=True, exist_ok=True)
    finish_moves(path)
    is_new = not path.exists()
    place, name = (path.parent, f".{path.name}{STAGING}") if is_new else (path, STAGING)
    with _saving(path, place / f"{name}.lock") as lock, scratch_directory(place, name) as staging:
        yield staging
        mode = staging.stat().st_mode & 0o666  # of a new file: safetensors writes files that only their user can read
        for file in filter(Path.is_file, staging.rglob("*")):
            file.chmod(mode)
        if not path.exists():
            lock.unlink()  # a later save, to the directory that then exists, has its lock elsewhere
            staging.rename(path)
        else:
            _move_files(staging, path, old, last)


@contextmanager
def _saving(path: Path, lock: Path) -> Iterator[Path]:
    """Hold the lock of a directory that is saved to, and yield it."""
    busy = f"Another process or thread is saving to {path}: let only one of them save."
    with locked(lock, busy):
        try:
            yield lock
        finally:
            lock.unlink(missing_ok=True)


def finish_moves(directory: str | Path) -> None:
    """Complete a save to this directory if its process was killed while files were moved, and log it."""
    path = Path(os.path.realpath(directory))
    staging = path / STAGING
    if not (staging / MOVES).exists():
        return
    with _saving(path, path / f"{STAGING}.lock"):
        moves = _read_moves(staging, path)
        _move(moves)
        if left := [place for place, _ in moves if place.is_relative_to(staging) and os.path.lexists(place)]:
            raise FileExistsError(
                f"A save to {path} was interrupted, and {left[0].name} was written since. The save's files are in "
                f"{staging}, and the previous ones in {staging / REPLACED}: keep what you need, and delete {staging}."
            )
        (staging / MOVES).unlink()
        shutil.rmtree(staging, ignore_errors=True)
    logger.warning(f"A save to {path} was interrupted while its files were moved. It is completed now.")


def _moves(staging: Path, path: Path, old: Iterable[str], new: Iterable[str]) -> Moves:
    return [(path / file, staging / REPLACED / file) for file in old] + [(staging / file, path / file) for file in new]


def _read_moves(staging: Path, path: Path) -> Moves:
    """Return the moves of an interrupted save. Raise `ValueError` if one would leave the directory."""
    try:
        names = json.loads((staging / MOVES).read_bytes())
        moves = _moves(staging, path, names["old"], names["new"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{staging / MOVES} is damaged: keep what you need from {staging}, and delete it.") from error
    for place in (place for move in moves for place in move):
        if place.name == ".." or not Path(os.path.realpath(place.parent)).is_relative_to(path):
            raise ValueError(f"{staging / MOVES} names {place}, which is not in {path}: delete {staging}.")
    return moves


def _move(moves: Moves) -> None:
    """Move files that are not moved yet."""
    for place, target in moves:
        if os.path.lexists(place) and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(place, target)


def _move_files(staging: Path, path: Path, patterns: Iterable[str], last: str) -> None:
    """Put new files in the place of old ones. If one cannot be moved, all old files come back."""
    files = (file.relative_to(staging) for file in staging.rglob("*") if not file.is_dir())
    new = sorted(files, key=lambda file: (file == Path(last), file))
    for file in new:
        if (path / file).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path / file))
    matching = (file for pattern in (last, *patterns) for file in path.glob(pattern) if file.is_file())
    removed = {file.relative_to(path) for file in matching}
    found = removed.union(file for file in new if os.path.lexists(path / file))
    old = sorted(found, key=lambda file: file != Path(last))
    names = {"old": [file.as_posix() for file in old], "new": [file.as_posix() for file in new]}
    moves = _moves(staging, path, **names)
    try:
        write_atomically(staging / MOVES, json.dumps(names).encode())
        _move(moves)
    except BaseException:
        _move([(target, place) for place, target in reversed(moves)])
        (staging / MOVES).unlink(missing_ok=True)
        raise
    (staging / MOVES).unlink()


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
