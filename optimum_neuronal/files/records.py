"""Records of an unfinished prune: one safetensors file for each finished block or step, whole or absent."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..common.notes import get_logger
from ..common.processes import Processes
from .atomic import scratch_directory, write_atomically
from .directories import check_writable
from .locking import locked


logger = get_logger(__name__)

IDENTITY = "identity.json"
LOCK = ".lock"
SHOWN = 8  # settings whose values an error shows; commands differ in more
SUFFIX = ".record.safetensors"
# Tensors that hold a record's JSON value and the checksum of all others, as bytes; no module has these names.
VALUE, CHECKSUM = "/value", "/sha256"
DAMAGED = (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError)

Finding = tuple[Any, dict[str, torch.Tensor]]  # a JSON value and tensors


class Records:
    """Findings of finished blocks and steps in a directory. Without a directory nothing is recorded.

    If the disk fills up, a warning says so and the prune continues. `identity` holds the values that the records depend
    on. Only the first process has a directory.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        identity: Mapping[str, Any] | None = None,
        processes: Processes | None = None,
    ):
        self.processes = processes or Processes()
        self.resumed = False  # True once a record of an earlier run was read
        self._own: set[str] = set()  # names of the records of this run
        self.directory = None if directory is None else Path(directory)
        if self.directory is not None:
            _begin(self.directory, json.loads(json.dumps(dict(identity or {}))))

    def get(self, name: str) -> Finding | None:
        """Return a JSON value and tensors on the CPU, or None without a readable record."""
        if self.directory is None or not self._path(name).exists():
            return None
        try:
            tensors = load(self._path(name).read_bytes())
            if not torch.equal(tensors.pop(CHECKSUM), _checksum(tensors)):
                raise ValueError("its checksum is wrong")
            value = json.loads(bytes(tensors.pop(VALUE).tolist()))
            self.resumed |= name not in self._own
            return value, tensors
        except DAMAGED as error:
            logger.warning(f"{self._path(name)} is damaged ({error}): its result is computed again.")
            return None

    def put(self, name: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record a JSON value and tensors under a name of letters, digits and hyphens."""
        if self.directory is None:
            return
        self._own.add(name)
        held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        held[VALUE] = _as_tensor(json.dumps(value).encode())
        held[CHECKSUM] = _checksum(held)
        try:
            write_atomically(self._path(name), save(held))
        except OSError as error:
            logger.warning_once(f"{self.directory} cannot be written ({error}): the prune continues without a record.")

    def recorded(self, name: str, make: Callable[[], Finding]) -> Finding:
        """Return the recorded finding, which all processes get from the first, or make and record it."""
        finding = self.processes.from_first(self.get(name))
        if finding is None:
            finding = make()
            self.put(name, *finding)
        return finding

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{SUFFIX}"


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def _checksum(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return _as_tensor(hashlib.sha256(save(dict(tensors))).digest())


def _begin(directory: Path, identity: dict[str, Any]) -> None:
    """Mark a directory as this prune's, or raise `ValueError` if it belongs to another.

    Records without an identity may belong to any prune, so they are removed.
    """
    path = directory / IDENTITY
    directory.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        if not all(_is_own(entry.name) for entry in directory.iterdir()):
            raise ValueError(f"{directory} holds other files: choose an empty directory to record in.")
        if stale := list(directory.glob(f"*{SUFFIX}")):
            logger.warning(f"{directory} has records without {IDENTITY}: they are removed, and nothing is resumed.")
        for file in stale:
            file.unlink()
        write_atomically(path, json.dumps(identity, indent=2).encode())
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # not JSON
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{path} is damaged: delete {directory} to start again.")
    names = [name for name in sorted({**before, **identity}) if before.get(name) != identity.get(name)]
    if names:
        changes = "; ".join(f"{name} was {before.get(name)!r}, is {identity.get(name)!r}" for name in names)
        if len(names) > SHOWN:
            changes = f"{', '.join(names[:3])} and {len(names) - 3} others. Another command may have started it"
        raise ValueError(
            f"{directory} holds unfinished work that was started with different settings: {changes}. Use the same "
            "settings, or delete that directory to start again."
        )


def _is_own(name: str) -> bool:
    """Return True for the names of files that are written here, including temporary ones."""
    name = re.sub(r"\.\d+\.tmp$", "", name)
    return name.removeprefix(".") == IDENTITY or name == LOCK or name.endswith(SUFFIX)


@contextmanager
def work_directory(directory: str | Path | None) -> Iterator[Path | None]:
    """Create and lock a directory for the first process, and yield its absolute path; None: nothing is recorded.

    If it is made here and no records are in it at the end, it is removed.
    """
    if directory is None or Processes.current().rank > 0:
        yield None
        return
    path = check_writable(directory, "record in")
    existed = path.exists()
    with _locked(path):
        try:
            yield path
        finally:
            if not (path / IDENTITY).exists():
                (path / LOCK).unlink(missing_ok=True) if existed else remove_records(path)


def hidden_directory(output: str | Path) -> Path:
    """Return where unfinished work on an output is recorded, unless the user chooses: hidden, next to it."""
    path = Path(os.path.abspath(output))
    return path.parent / f".{path.name}.unfinished"


@contextmanager
def weights_directory(directory: Path) -> Iterator[Path]:
    """Create and lock a directory, and yield an empty one in it for the weights of a model. Both are removed at the end."""
    with _locked(directory):
        try:
            with scratch_directory(directory, "weights") as weights:
                yield weights
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Create a directory and lock it. Raise `BlockingIOError` if it is in use."""
    directory.mkdir(parents=True, exist_ok=True)
    busy = f"{directory} is in use by another run: wait for it to end, or choose another directory."
    with locked(directory / LOCK, busy):
        yield


def remove_records(directory: Path | None) -> None:
    """Remove the records in a directory, and the directory if nothing else is in it.

    The identity is removed after all records, so that a kill leaves no record without it.
    """
    if directory is None:
        return
    with suppress(OSError):  # it is gone, not empty or a link
        for file in sorted(directory.iterdir(), key=lambda file: (file.name == LOCK, file.name == IDENTITY)):
            if _is_own(file.name):
                file.unlink()
        if not directory.samefile(os.curdir):
            directory.rmdir()
