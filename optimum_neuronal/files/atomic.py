"""Replaces a file, or the files of a directory, as a whole: a kill leaves the old files, the new ones, or visibly no model.

The new files are written and brought to the disk in a hidden *staging* folder first. A directory that does not exist yet
then appears by one renaming. Into one that exists, the files are moved one by one: the file without which the directory
is no model is moved away first and moved in last. A kill between these moves loses nothing: what was not moved yet is whole
in the staging folder, until the next save removes it. After an error or Ctrl-C between these moves, everything is moved back.

What is written survives a power cut. What a program has written may otherwise be in memory alone for half a minute.
"""

import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .scratch import remove_left_over, scratch_directory


STAGING = ".saving"  # the staging folder's name begins with it
REPLACED = "replaced"  # a folder beside it, for old files that the new ones replace


@contextmanager
def replaced_directory(directory: str | Path, belongs: Callable[[str], bool], last: str) -> Iterator[Path]:
    """Yield an empty staging folder, and move its files into the directory when the block ends.

    An exception, in the block or while files are moved, leaves the directory as it was. Staging folders of killed processes
    are removed first.

    Args:
        directory (`str` or `Path`): may exist or not; of a symbolic link, the directory that it points to.
        belongs (`Callable[[str], bool]`):
            True for the name of a file that is removed if the staging folder has none of this name. All other files and
            folders of the directory stay, unless a new file has their name.
        last (`str`): name of the file without which the directory is no model.

    Raises:
        `FileExistsError`: a file would take a folder's place, or a folder a file's; nothing was changed.
        `OSError`: the disk is full, or may not be written.
    """
    path = Path(os.path.realpath(directory))
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_over(path.parent, STAGING)
    with scratch_directory(path if path.exists() else path.parent, STAGING) as staging:
        yield staging
        _check_kinds(staging, path)
        _open_to_readers(staging)
        tree_to_disk(staging)
        if path.exists():
            _move_files(staging, path, belongs, last)
        else:
            _move_folder(staging, path)


def _check_kinds(new: Path, old: Path) -> None:
    """Raise `FileExistsError` if a file would take a folder's place, or a folder a file's."""
    for entry in list(os.scandir(new)):
        place = old / entry.name
        if place.exists() and place.is_dir() != entry.is_dir():
            kind = "folder" if place.is_dir() else "file"
            raise FileExistsError(f"{place} is a {kind} in the way: rename it or choose another directory.")


def _open_to_readers(directory: Path) -> None:
    """Give all files below a directory the mode of a new file, by the umask: some libraries write files for their user alone."""
    sample = directory / f".{uuid.uuid4().hex[:8]}"
    sample.touch()  # a process can only read its umask by changing it, for all threads
    mode = stat.S_IMODE(sample.stat().st_mode)
    sample.unlink()
    for folder, _, files in os.walk(directory):
        for name in files:
            os.chmod(os.path.join(folder, name), mode)


def _move_folder(staging: Path, path: Path) -> None:
    """Give a new directory its name, or leave nothing."""
    try:
        staging.rename(path)
        directory_to_disk(path.parent)
    except BaseException:
        if not staging.exists():
            path.rename(staging)
        raise


def _move_files(staging: Path, path: Path, belongs: Callable[[str], bool], last: str) -> None:
    """Replace the old files by the new ones, or leave all as they were. The order holds after a power cut too."""
    new, aside = sorted(os.listdir(staging), key=lambda name: name == last), staging.with_name(REPLACED)
    old = [e.name for e in os.scandir(path) if e.name in (*new, last) or (e.is_file() and belongs(e.name))]
    old.sort(key=lambda name: name != last)
    aside.mkdir()
    try:
        for name in old:
            os.rename(path / name, aside / name)
            if name == last:
                directory_to_disk(path)
        for name in new:
            if name == last:
                directory_to_disk(path)
            os.replace(staging / name, path / name)
        directory_to_disk(path)
    except BaseException:
        for name in reversed(new):
            if not os.path.lexists(staging / name):
                os.rename(path / name, staging / name)
        for name in reversed(old):
            if os.path.lexists(aside / name):
                os.rename(aside / name, path / name)
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is whole or absent, or as it was, whatever happens meanwhile, a power cut included.

    Args:
        path (`Path`): of the file, in an existing directory.
        content (`bytes`): all of it.

    Raises:
        `OSError`: it cannot be written, and is as it was or new; the message names it.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "xb") as file:  # a new file: what a link of this name points to is never written
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory_to_disk(path.parent)  # the renaming too
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a full disk names no file
        raise


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
