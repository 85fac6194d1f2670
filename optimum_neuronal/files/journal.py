"""The record of an unfinished prune: what is finished is written down at once, and never done twice.

A record is whole or absent, whatever happens while it is written: it is written under another name, brought to the
disk, and renamed. What the disk does to it later is told by a checksum: a damaged record counts as absent. Since a
prune is deterministic, its steps are told apart by their number alone.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..system.notes import get_logger
from .durable import write_durably


logger = get_logger(__name__)

IDENTITY = "identity.json"
LOCK = ".lock"  # held by whoever uses the directory, see `WorkDirectory`
RECORDS = "records"  # in the identity: the number of the records' format; before there were others it was left out
SUFFIX = ".record.safetensors"
DAMAGED = ".damaged"  # what the name of a file ends with that was set aside
VALUE, CHECKSUM = "value", "blake2b"  # in the metadata of a record

_FILE = rf"(?:{re.escape(IDENTITY)}|[\w-]+{re.escape(SUFFIX)})"
OWN_FILE = re.compile(rf"{_FILE}(?:{re.escape(DAMAGED)})?|\.{_FILE}\.[0-9a-f]+|{re.escape(LOCK)}")


class Journal:
    """Records in a directory. Without a directory nothing is kept and nothing is found.

    A disk that is full, or fails, costs records and stops nobody: it is warned of once.

    Args:
        directory (`str` or `Path`, *optional*): made if it does not exist.
        identity (`Mapping[str, Any]`, *optional*):
            What the records depend on, JSON-serialisable: name -> value. A directory that holds records of something
            else is refused. The value of `"records"`, if there is one, numbers the format of the records.

    Raises:
        `ValueError`: the directory's records are of another prune, and the message names what changed; or of another
            format, which another release of this package wrote; or it holds files that are no records.
        `OSError`: the directory cannot be made, read or written.
    """

    def __init__(self, directory: str | Path | None = None, identity: Mapping[str, Any] | None = None):
        self.directory = None if directory is None else Path(directory)
        self._warned = False
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._begin(json.loads(json.dumps(dict(identity or {}))))

    def _begin(self, identity: dict[str, Any]) -> None:
        # Part of every checksum, so that no record of another prune is ever taken for one of this.
        self._own = json.dumps(identity, sort_keys=True).encode()
        path = self.directory / IDENTITY
        before = self._read_identity(path)
        if before is not None:
            _check(self.directory, before, identity)
            return
        if any(not OWN_FILE.fullmatch(entry.name) for entry in self.directory.iterdir()):
            raise ValueError(f"{self.directory} holds something else than an unfinished prune: choose another.")
        try:
            write_durably(path, json.dumps(identity, indent=2).encode())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._warn(error)
            self.directory = None

    def _read_identity(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(before, dict):
                return before
            error: Exception = ValueError("it is no JSON object")
        except ValueError as damage:
            error = damage
        _set_aside(path, error)
        return None

    @property
    def keeps(self) -> bool:
        """Whether anything is recorded."""
        return self.directory is not None

    def has_room(self, size: int) -> bool:
        """Whether the directory's disk can take so many bytes beside what is replaced by them."""
        with suppress(OSError):
            return self.keeps and shutil.disk_usage(self.directory).free > size
        return False

    def get(self, name: str) -> tuple[Any, dict[str, torch.Tensor]] | None:
        """What was recorded under a name: a JSON value and tensors on the CPU.

        None if nothing was; or if the record is damaged, which is warned of, and the file is set aside.
        """
        if self.directory is None or not (path := self._path(name)).exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
            value = metadata.get(VALUE, "")
            if metadata.get(CHECKSUM) != self._checksum(name, value, tensors):
                raise ValueError("its checksum is another")
            return json.loads(value), tensors
        except (SafetensorError, ValueError, RuntimeError, OSError) as error:
            _set_aside(path, error)
            return None

    def put(self, name: str, value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Records a JSON value and tensors under a name: letters, digits and hyphens. What was there is replaced."""
        if self.directory is None:
            return
        held = {key: tensor.detach().cpu().contiguous() for key, tensor in (tensors or {}).items()}
        text = json.dumps(value)
        content = save(held, metadata={VALUE: text, CHECKSUM: self._checksum(name, text, held)})
        try:
            write_durably(self._path(name), content)
        except OSError as error:
            self._warn(error)

    def drop(self, name: str) -> None:
        """Forgets what was recorded under a name."""
        if self.directory is not None:
            with suppress(OSError):  # a disk that fails: what is finished is looked up first
                self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{SUFFIX}"

    def _checksum(self, name: str, value: str, tensors: Mapping[str, torch.Tensor]) -> str:
        digest = hashlib.blake2b(self._own, digest_size=16)
        digest.update(f"{name}\n{value}\n".encode())
        for key, tensor in sorted(tensors.items()):
            digest.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            logger.warning(
                f"{self.directory} cannot be written ({error}): the prune goes on, and what is not recorded would be done "
                "again after an interruption."
            )
        self._warned = True


def _set_aside(path: Path, error: Exception) -> None:
    """Renames a damaged file, so that what it held is measured anew."""
    aside = path.with_name(path.name + DAMAGED)
    with suppress(OSError):  # a disk that fails: the file will be replaced, if it can be
        os.replace(path, aside)
    logger.warning(f"{path} is damaged ({error}): it was set aside as {aside.name}, and what it held is found anew.")


def _check(directory: Path, before: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless a directory's records are of this prune."""
    begun, now = before.get(RECORDS, 1), identity.get(RECORDS, 1)
    if begun != now:
        raise ValueError(
            f"{directory} holds an unfinished prune that was begun by {'an earlier' if begun < now else 'a later'} "
            "release of optimum_neuronal, whose records this one does not read: delete it to begin anew."
        )
    if changes := list(_changes(before, identity)):
        told = "; ".join(changes)
        raise ValueError(
            f"{directory} holds an unfinished prune that was begun otherwise: {told}. Run it as it was begun, or "
            "delete that directory to begin anew."
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """What is told of every value that differs; of mappings, of every value in them."""
    for name in sorted({**before, **now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f" ({name})")
        elif old != new:
            yield f"{name} was {old!r}, is {new!r}{within}"
