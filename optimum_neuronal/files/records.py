"""Records of an unfinished prune: one safetensors file for each finished block or step.

A file's name holds a checksum of its content and of the prune that it belongs to. A record is therefore whole or absent,
whatever happens while it is written or lies on the disk, and a record of another prune is never taken for one of this.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..common.notes import get_logger
from ..common.processes import Processes
from .atomic import write_durably
from .directories import check_writable


logger = get_logger(__name__)

IDENTITY = "identity.json"
LOCK = ".lock"
SUFFIX = ".safetensors"
VALUE = "/value"  # the tensor that holds a record's JSON value, as bytes; no module has this name
DIGEST = 16  # bytes of a checksum
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)  # what disks without locks answer

_FILE = rf"(?:{re.escape(IDENTITY)}|[\w-]+\.[0-9a-f]{{{2 * DIGEST}}}{re.escape(SUFFIX)})"
OWN_FILE = re.compile(rf"{_FILE}(?:\.damaged)?|\.{_FILE}\.[0-9a-f]+|{re.escape(LOCK)}")

Finding = tuple[Any, dict[str, torch.Tensor]]  # a JSON value and tensors


class Records:
    """Findings of finished blocks and steps in a directory. Without a directory nothing is recorded.

    A disk that is full or fails loses records but stops no prune. A warning says so once.

    Args:
        directory (`str` or `Path`, *optional*): made if it does not exist.
        identity (`Mapping[str, Any]`, *optional*): JSON-serialisable values that the records depend on, by name.
        processes ([`Processes`], *optional*): share the work. Only the first one has a directory.

    Raises:
        `ValueError`: the directory holds records of another prune, or something else. The message says what differs.
        `OSError`: the directory cannot be made, read or written.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        identity: Mapping[str, Any] | None = None,
        processes: Processes | None = None,
    ):
        self.processes = processes or Processes()
        self._key = json.dumps(dict(identity or {}), sort_keys=True)
        self.directory = None if directory is None else _begin(Path(directory), json.loads(self._key))

    @property
    def keeps(self) -> bool:
        """True if findings are recorded."""
        return self.directory is not None

    def has_room(self, size: int) -> bool:
        """Return True if the directory's disk has room for so many bytes."""
        with suppress(OSError):
            return self.keeps and shutil.disk_usage(self.directory).free > size
        return False

    def get(self, name: str) -> Finding | None:
        """Return the finding of a name: a JSON value, and tensors on the CPU.

        Returns None if there is no record. A damaged file is set aside with a warning, and counts as no record.
        """
        for path in sorted(self.directory.glob(f"{name}.*{SUFFIX}")) if self.keeps else ():
            try:
                content = path.read_bytes()
                if path != self._path(name, content):
                    raise ValueError("its checksum is another")
                tensors = load(content)
                return json.loads(bytes(tensors.pop(VALUE).tolist())), tensors
            except (SafetensorError, ValueError, OSError) as error:
                _set_aside(path, error)
        return None

    def holds(self, name: str) -> bool:
        """Return True if there is a record of a name, damaged or not."""
        return self.keeps and any(self.directory.glob(f"{name}.*{SUFFIX}"))

    def put(self, name: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record a JSON value and tensors under a name of letters, digits and hyphens."""
        if self.directory is None:
            return
        held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        content = save(held | {VALUE: torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)})
        try:
            write_durably(self._path(name, content), content)
        except OSError as error:
            _warn_of_disk(self.directory, error)

    def recorded(self, name: str, make: Callable[[], Finding]) -> Finding:
        """Return the finding of a name, or make and record it. All processes get the finding of the first one."""
        found = self.processes.from_first(self.get(name))
        if found is None:
            found = make()
            self.put(name, *found)
        return found

    def _path(self, name: str, content: bytes) -> Path:
        digest = hashlib.blake2b(f"{self._key}\n{name}\n".encode(), digest_size=DIGEST)
        digest.update(content)
        return self.directory / f"{name}.{digest.hexdigest()}{SUFFIX}"


def _begin(directory: Path, identity: dict[str, Any]) -> Path | None:
    """Mark a directory as this prune's, and return it. Returns None if its disk is full."""
    path = directory / IDENTITY
    before = _read_identity(path)
    if before is not None:
        if changes := "; ".join(_changes(before, identity)):
            raise ValueError(
                f"{directory} holds an unfinished prune that was begun otherwise: {changes}. Run it as it was begun, or "
                "delete that directory to begin anew."
            )
        return directory
    if directory.exists() and any(not OWN_FILE.fullmatch(entry.name) for entry in directory.iterdir()):
        raise ValueError(f"{directory} holds something else than an unfinished prune: choose another.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(identity, indent=2).encode())
    except OSError as error:
        if error.errno not in FULL:
            raise
        _warn_of_disk(directory, error)
        return None
    return directory


def _read_identity(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        _set_aside(path, error)
        return None
    return before


def _set_aside(path: Path, error: Exception) -> None:
    """Rename a damaged file."""
    aside = path.with_name(path.name + ".damaged")
    with suppress(OSError):  # a disk that fails
        os.replace(path, aside)
    logger.warning(f"{path} is damaged ({error}): it was set aside as {aside.name}, and its finding is made anew.")


def _warn_of_disk(directory: Path, error: OSError) -> None:
    logger.warning_once(
        f"{directory} cannot be written ({error}): the prune goes on, and work that is not recorded would be done again "
        "after an interruption."
    )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield a text for every value that differs, in nested mappings too."""
    for name in sorted({**before, **now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f" ({name})")
        elif old != new:
            yield f"{name} was {old!r}, is {new!r}{within}"


@dataclass(frozen=True)
class WorkDirectory:
    """The directory of an unfinished prune, held by this process. See [`work_directory`].

    Args:
        path (`Path`, *optional*): absolute. None: nothing is recorded.
    """

    path: Path | None

    def remove(self) -> None:
        """Remove the records, and the directory unless it holds something else, is a link or the working directory.

        A failure to remove them is a warning: the work is done.
        """
        if self.path is None or not self.path.is_dir():
            return
        try:
            for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name == LOCK):  # the lock last
                if OWN_FILE.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
        except OSError as error:
            logger.warning(f"What is left of the finished prune in {self.path} could not be removed: {error}")
        if not self.path.samefile(os.curdir):
            with suppress(OSError):  # it holds something else, is a link, or its parent may not be written
                self.path.rmdir()


@contextmanager
def work_directory(directory: str | Path | None) -> Iterator[WorkDirectory]:
    """Hold a directory for one process. If nothing was recorded there, it is removed at the end.

    Of several processes that share the work, only the first one records.

    Args:
        directory (`str` or `Path`, *optional*): made if it does not exist.

    Raises:
        `ValueError`, `OSError`: it cannot be written, see [`check_writable`].
        `BlockingIOError`: another prune uses it. The message names the process.
    """
    if directory is None or Processes.current().rank > 0:
        yield WorkDirectory(None)
        return
    path = check_writable(directory, "record in")
    lock = acquired(path / LOCK)
    folder = WorkDirectory(path)
    try:
        yield folder
    finally:
        if not (path / IDENTITY).exists():
            folder.remove()
        lock.release()


def acquired(file: Path) -> FileLock:
    """Return the acquired lock of a file; nothing is locked where the disk has no locks.

    The file and its directory are made if they do not exist.

    Raises:
        `BlockingIOError`: another process holds it; the message names the process.
        `OSError`: the file cannot be made, or is a symbolic link.
    """
    lock = FileLock(file, blocking=False, thread_local=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout as error:
        holder = ""
        with suppress(OSError):
            holder = file.read_text(encoding="utf-8", errors="replace")[:200].strip()
        raise BlockingIOError(
            f"{file.parent} is in use by {holder or 'another process'}: wait for it to end, or choose another directory."
        ) from error
    except OSError as error:
        if error.errno not in (*NO_LOCKS, *FULL):  # a full disk: the lock has no name
            raise
    return lock
