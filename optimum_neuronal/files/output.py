"""Writes a new directory or file, which appears whole, by one rename.

The output does not exist yet, or is an empty directory. Nothing is merged into files that lie there. With `overwrite`, a
model's directory is replaced with all that is in it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .directories import check_writable
from .locking import locked


CONFIG = "config.json"  # a directory without it is not a model

State = tuple[int, int] | None  # inode of a directory and the time of its last change; None: absent or empty


@dataclass(frozen=True)
class Output:
    """A directory to write, checked by [`check_output`]."""

    path: Path  # absolute
    replaced: State = None  # the model's directory that is replaced


def check_output(
    directory: str | Path, overwrite: bool = False, kept: Iterable[str | Path | None] = (), purpose: str = "save to"
) -> Output:
    """Return an output that may be written.

    Args:
        directory (`str` or `Path`): absent, or an empty directory.
        overwrite (`bool`): True to replace a directory that holds a model, with all that is in it.
        kept: what is read meanwhile and must not be replaced, such as the dense model. Hub ids and None are ignored.
        purpose (`str`): for errors.

    Raises:
        `FileExistsError`: something lies there that may not be replaced.
        `OSError`: it cannot be written.
    """
    path = check_writable(directory, purpose)
    if (left := _replaced(path)).exists():
        raise FileExistsError(f"{left} holds what {path} was before a save was killed: move it back, or delete it.")
    if not os.path.lexists(path) or _is_empty(path):
        return Output(path)
    found = f"{path} {_describe(path)}"
    if not (path.is_dir() and (path / CONFIG).is_file()) or path.is_symlink():
        raise FileExistsError(f"{found}: choose a new directory.")
    if not overwrite:
        raise FileExistsError(
            f"{found}: choose a new directory, or pass --overwrite (overwrite=True) to replace it with all that is in it."
        )
    inside = (Path(os.path.realpath(place)) for place in (os.curdir, *filter(None, kept)) if os.path.exists(place))
    if (path / ".git").exists() or any(place.is_relative_to(os.path.realpath(path)) for place in inside):
        raise FileExistsError(
            f"{found}, and is a git repository, the working directory or the place of a model that is read: choose a new "
            "directory."
        )
    return Output(path, _state(path))


@contextmanager
def new_directory(output: Output) -> Iterator[Path]:
    """Yield an empty directory next to the output, and rename it to the output when the block ends without an exception.

    If something else lies there by then, `FileExistsError` says where the complete new directory waits.
    """
    path = output.path
    path.parent.mkdir(parents=True, exist_ok=True)
    staging, lock = path.with_name(f".{path.name}.saving"), path.with_name(f".{path.name}.lock")
    with locked(lock, f"Another process or thread is saving to {path}: let only one of them save."):
        shutil.rmtree(staging, ignore_errors=True)  # of a killed process
        staging.mkdir()
        try:
            yield staging
            mode = (
                staging.stat().st_mode & 0o666
            )  # of a new file: safetensors writes files that only their user can read
            for file in filter(Path.is_file, staging.rglob("*")):
                file.chmod(mode)
            _publish(staging, output)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            lock.unlink(missing_ok=True)


def write_new_file(path: Path, content: bytes) -> None:
    """Write a file that does not exist yet, whole or not at all. Raise `FileExistsError` if it exists."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _publish(staging: Path, output: Output) -> None:
    path, old = output.path, _replaced(output.path)
    try:
        if _state(path) != output.replaced:
            raise FileExistsError
        if output.replaced is None:
            with suppress(FileNotFoundError):
                path.rmdir()
            staging.rename(path)
            return
        path.rename(old)
        try:
            staging.rename(path)
        except BaseException:
            old.rename(path)
            raise
    except OSError as error:
        waiting = tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent)
        os.replace(staging, waiting)
        raise FileExistsError(
            f"{path} changed while its new content was made, so it is not replaced. The complete result is in {waiting}."
        ) from error
    shutil.rmtree(old)


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _state(path: Path) -> State:
    if not os.path.lexists(path) or _is_empty(path):
        return None
    found = path.lstat()
    return found.st_ino, found.st_mtime_ns


def _describe(path: Path) -> str:
    """Return what lies at a path, for an error."""
    if path.is_symlink():
        return "is a link"
    if not path.is_dir():
        return "is a file"
    count = sum(len(files) for _, _, files in os.walk(path))
    return f"holds {count:,} file{'s' if count != 1 else ''}" + (", a model" if (path / CONFIG).is_file() else "")
