"""Writes a new directory or file, which appears whole, by one rename.

The output does not exist yet, or is an empty directory. Nothing is merged into files that lie there. With `overwrite`, a
model's directory is replaced with all that is in it.
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError


CONFIG = "config.json"  # a directory without it is not a model

State = frozenset[tuple[Path, int, int]]  # path, inode and last change of a directory and all that is in it


@dataclass(frozen=True)
class Output:
    """A directory to write, checked by [`check_output`]."""

    path: Path  # absolute
    replaced: State = frozenset()  # the model's directory that is replaced; empty if nothing is


def check_output(directory: str | Path, overwrite: bool = False, kept: Iterable[str | Path | None] = ()) -> Output:
    """Return an output that may be written.

    Args:
        directory (`str` or `Path`): absent, or an empty directory.
        overwrite (`bool`): True to replace a directory that holds a model, with all that is in it.
        kept: what is read meanwhile and must not be replaced, such as the dense model. Hub ids and None are ignored.

    Raises:
        `FileExistsError`: something lies there that may not be replaced.
        `OSError`: it cannot be written.
    """
    path = check_writable(directory, "save to")
    check_writable(path.parent, "save to")
    if reason := _why_kept(path, kept):
        raise FileExistsError(f"{path} {reason}: choose a new directory.")
    if (old := _beside(path, "replaced")).exists():
        raise FileExistsError(
            f"A save to {path} was killed while it replaced a model, which is in {old}; the new one may be in "
            f"{_beside(path, 'saving')}. Move one of them to {path}, and delete {old}."
        )
    if not (found := _state(path)):
        return Output(path)
    count = sum(len(files) for _, _, files in os.walk(path))
    holds = f"{path} holds {count:,} file{'s' if count != 1 else ''}"
    if not (path / CONFIG).is_file():
        raise FileExistsError(f"{holds}, and is not a model's directory: choose a new directory.")
    if not overwrite:
        raise FileExistsError(
            f"{holds} of a model: choose a new directory, or pass --overwrite (overwrite=True) to replace it with all "
            "that is in it."
        )
    return Output(path, found)


def check_writable(directory: str | Path, purpose: str) -> Path:
    """Return the absolute path of a directory that can be written or created. `purpose`: for errors, such as `"save to"`."""
    path = Path(os.path.abspath(directory))
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not existing.is_dir():
        raise NotADirectoryError(f"Cannot {purpose} {directory}: {existing} is a file. Choose another directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"Cannot {purpose} {directory}: no permission to write in {existing}.")
    return path


@contextmanager
def new_directory(output: Output) -> Iterator[Path]:
    """Yield an empty directory next to the output, and rename it to the output when the block ends without an exception.

    If something else lies there by then, `FileExistsError` says where the complete new directory waits.
    """
    path = output.path
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, staging = _beside(path, "lock"), _beside(path, "saving")
    busy = f"Another process or thread is saving to {path}: let only one of them save."
    with locked(lock, busy):
        try:
            shutil.rmtree(staging, ignore_errors=True)  # of a killed process
            staging.mkdir()
            yield staging
            mode = staging.stat().st_mode & 0o666  # safetensors writes files that only their user can read
            for file in filter(Path.is_file, staging.rglob("*")):
                file.chmod(mode)
            _publish(staging, output)
        except FileExistsError:
            raise
        except (OSError, SafetensorError) as error:  # the library's own error of a full disk
            raise OSError(f"Saving to {path} failed, and nothing was changed there: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            lock.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, is_new: bool = False) -> None:
    """Write a file in an existing directory. After an error it is absent or unchanged.

    With `is_new`, raise `FileExistsError` if it exists.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several processes may write the same file
    try:
        temporary.write_bytes(content)
        if is_new:
            path.touch(exist_ok=False)  # a hard link would do both at once, but some file systems have none
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # The error of a full disk does not name a file.
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def locked(file: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a file, which is created. Raise `BlockingIOError` with the text `busy` if another one holds it."""
    lock = FileLock(file, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(busy) from error
    try:
        yield
    finally:
        lock.release()


def leads_out(file: Path, folder: Path) -> bool:
    """Return True if a file of a checkpoint is a link to one outside its folder. The Hub's cache keeps them in `blobs`."""
    real, home = file.resolve(), folder.resolve()
    return not (real.is_relative_to(home) or real.is_relative_to(home.parent.parent / "blobs"))


def _publish(staging: Path, output: Output) -> None:
    path, old = output.path, _beside(output.path, "replaced")
    try:
        if _state(path) != output.replaced:
            raise FileExistsError("something else is there now")
        try:
            if output.replaced:
                path.rename(old)
            staging.rename(path)  # raises unless the path is absent or an empty directory
        except BaseException:
            if output.replaced and old.exists() and not os.path.lexists(path):
                old.rename(path)
            raise
    except OSError as error:
        waiting = tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent)
        os.replace(staging, waiting)
        raise FileExistsError(f"{path} was not written ({error}). The complete result is in {waiting}.") from error
    if output.replaced:
        shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def _state(path: Path) -> State:
    """Return what tells whether something changes at a path: nothing if it is absent, or an empty directory."""
    if not os.path.lexists(path) or not path.is_symlink() and path.is_dir() and not any(path.iterdir()):
        return frozenset()
    found = ((entry, entry.lstat()) for entry in itertools.chain([path], path.rglob("*")))
    return frozenset((entry, status.st_ino, status.st_mtime_ns) for entry, status in found)


def _why_kept(path: Path, kept: Iterable[str | Path | None]) -> str | None:
    """Return why a path may not become a new directory, whatever it holds, or None."""
    if path.is_symlink():
        return "is a link"
    if os.path.ismount(path):
        return "is a mount point, which cannot be renamed"
    if next(path.rglob(".git"), None) is not None:
        return "holds a git repository"
    for place in (os.curdir, *filter(None, kept)):
        if os.path.exists(place) and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(path)):
            return "holds the working directory" if place is os.curdir else f"holds {place}, which is read"
    return None
