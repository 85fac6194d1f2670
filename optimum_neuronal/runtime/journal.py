"""The record of an unfinished prune: what is finished is written down at once, and never done twice.

A record is whole or absent, whatever happens while it is written: it is written under another name, brought to the
disk, and renamed. Since a prune is deterministic, its steps are told apart by their number alone.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save


IDENTITY = "identity.json"
RECORDS = "records"  # in the identity: the number of the records' format; before there were others it was left out


class Journal:
    """Records in a directory. Without a directory nothing is kept and nothing is found.

    Args:
        directory (`str` or `Path`, *optional*): made if it does not exist.
        identity (`Mapping[str, Any]`, *optional*):
            What the records depend on, JSON-serialisable: name -> value. A directory that holds records of something
            else is refused. The value of `"records"`, if there is one, numbers the format of the records.

    Raises:
        `ValueError`: the directory's records are of another prune, and the message names what changed; or of another
            format, which another release of this package wrote.
    """

    def __init__(self, directory: str | Path | None = None, identity: Mapping[str, Any] | None = None):
        self.directory = None if directory is None else Path(directory)
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._check(json.loads(json.dumps(dict(identity or {}))))

    def _check(self, identity: dict[str, Any]) -> None:
        path = self.directory / IDENTITY
        if not path.exists():
            unfinished = f".{IDENTITY}."  # what a kill in its very first write has left, see `write_durably`
            if any(not entry.name.startswith(unfinished) for entry in self.directory.iterdir()):
                raise ValueError(f"{self.directory} holds something else than an unfinished prune: choose another.")
            self._write(IDENTITY, json.dumps(identity, indent=2).encode())
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        begun, now = before.get(RECORDS, 1), identity.get(RECORDS, 1)
        if begun != now:
            raise ValueError(
                f"{self.directory} holds an unfinished prune that was begun by {'an earlier' if begun < now else 'a later'} "
                "release of optimum_neuronal, whose records this one does not read: delete it to begin anew."
            )
        if changes := list(_changes(before, identity)):
            told = "; ".join(changes)
            raise ValueError(
                f"{self.directory} holds an unfinished prune that was begun otherwise: {told}. Run it as it was begun, or "
                "delete that directory to begin anew."
            )

    @property
    def keeps(self) -> bool:
        """Whether anything is recorded."""
        return self.directory is not None

    def has_room(self, size: int) -> bool:
        """Whether the directory's disk can take so many bytes beside what is replaced by them."""
        return self.keeps and shutil.disk_usage(self.directory).free > size

    def get(self, name: str) -> tuple[Any, dict[str, torch.Tensor]] | None:
        """What was recorded under a name: a JSON value and tensors on the CPU. None if nothing was."""
        if self.directory is None or not (path := self.directory / f"{name}.safetensors").exists():
            return None
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            return json.loads(file.metadata()["value"]), tensors

    def put(self, name: str, value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Records a JSON value and tensors under a name: letters, digits and hyphens. What was there is replaced."""
        if self.directory is not None:
            held = {key: tensor.detach().cpu().contiguous() for key, tensor in (tensors or {}).items()}
            self._write(f"{name}.safetensors", save(held, metadata={"value": json.dumps(value)}))

    def drop(self, name: str) -> None:
        """Forgets what was recorded under a name."""
        if self.directory is not None:
            (self.directory / f"{name}.safetensors").unlink(missing_ok=True)

    def _write(self, name: str, content: bytes) -> None:
        write_durably(self.directory / name, content)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """What is told of every value that differs; of mappings, of every value in them."""
    for name in sorted({**before, **now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f" ({name})")
        elif old != new:
            yield f"{name} was {old!r}, is {new!r}{within}"


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file that is whole or absent, or as it was, whatever happens meanwhile, a power cut included."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):  # the renaming too must survive a power cut
        handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
