"""Records of an unfinished run: one safetensors file for each finished block or step, in a directory of its own.

A directory belongs to one run. It is absent or empty when the run starts, and removed with all that is in it when the run
ends. What an interrupted run leaves serves the same run alone.
"""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import PreTrainedModel

from .. import __version__
from ..common.notes import get_logger
from ..common.processes import Processes
from ..compat import hf_private
from .output import locked, write_atomically


logger = get_logger(__name__)

IDENTITY = "identity.json"
LOCK = ".neuronal.lock"  # made first: whatever lies beside it is the run's
SHOWN = 3  # settings that an error shows
SUFFIX = ".record.safetensors"
VALUE = "/value"  # tensor that holds a record's JSON value as bytes; no module has this name

Finding = tuple[Any, dict[str, torch.Tensor]]  # a JSON value and tensors


class Records:
    """Findings of finished blocks and steps in a directory. Without a directory nothing is recorded.

    If the disk fills up, a warning says so and the run continues. `identity` holds the values that the records depend on.
    Only the first process has a directory.
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
            _identify(self.directory, json.loads(json.dumps(dict(identity or {}))))

    def get(self, name: str) -> Finding | None:
        """Return a JSON value and tensors on the CPU, or None without a record. Raise `ValueError` if it is damaged."""
        if self.directory is None or not self._path(name).exists():
            return None
        try:
            tensors = load(self._path(name).read_bytes())
            value = json.loads(bytes(tensors.pop(VALUE).tolist()))
        except (SafetensorError, KeyError, ValueError) as error:
            raise _damaged(self._path(name)) from error
        self.resumed |= name not in self._own
        return value, tensors

    def put(self, name: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record a JSON value and tensors under a name of letters, digits and hyphens."""
        if self.directory is None:
            return
        self._own.add(name)
        held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        held[VALUE] = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        try:
            write_atomically(self._path(name), save(held))
        except OSError as error:
            logger.warning_once(f"{self.directory} cannot be written ({error}): the run continues without a record.")

    def recorded(self, name: str, make: Callable[[], Finding]) -> Finding:
        """Return the recorded finding, which all processes get from the first, or make and record it."""
        finding = self.processes.from_first(self.get(name))
        if finding is None:
            finding = make()
            self.put(name, *finding)
        return finding

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{SUFFIX}"


def _identify(directory: Path, identity: dict[str, Any]) -> None:
    """Write the identity of a run, or raise `ValueError` if the directory has another one."""
    path = directory / IDENTITY
    directory.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_atomically(path, json.dumps(identity, indent=2).encode())
        return
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise _damaged(path) from error
    if names := [name for name in sorted({**before, **identity}) if before.get(name) != identity.get(name)]:
        changes = "; ".join(f"{name} was {before.get(name)!r}, is {identity.get(name)!r}" for name in names[:SHOWN])
        more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ValueError(
            f"{directory} holds unfinished work that was started with different settings: {changes}{more}. Use the same "
            "settings, or delete that directory to start again."
        )


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged: delete {path.parent} to start again.")


@contextmanager
def run_directory(directory: str | Path) -> Iterator[Path]:
    """Create a directory for one run, or take over the one it left, lock it, and yield its absolute path.

    At the end, it is removed with all that is in it unless it holds records.

    Raises:
        `ValueError`: it holds files that no run left.
        `BlockingIOError`: another run uses it.
    """
    path = Path(directory).absolute()
    if path.is_dir() and not (path / LOCK).exists() and any(path.iterdir()):
        raise ValueError(f"{path} holds other files: choose a directory that is empty or does not exist.")
    path.mkdir(parents=True, exist_ok=True)
    busy = f"{path} is in use by another run: wait for it to end, or choose another directory."
    with locked(path / LOCK, busy):
        if not (path / IDENTITY).exists():
            # Of a run that was killed before it recorded anything, or while this was removed.
            for entry in path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()
        try:
            yield path
        finally:
            if not (path / IDENTITY).exists() or not any(path.glob(f"*{SUFFIX}")):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def work_directory(directory: str | Path | None, output: str | Path | None = None) -> Iterator[Path | None]:
    """Yield the [`run_directory`] of the first process, where it records; None: nothing is recorded.

    Raise `ValueError` if it lies in the output or the output lies in it.
    """
    if directory is None or Processes.current().rank > 0:
        yield None
        return
    if output is not None:
        one, other = (Path(os.path.realpath(place)) for place in (directory, output))
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise ValueError(f"The work directory {directory} and the output {output} must not lie in each other.")
    with run_directory(directory) as path:
        yield path


def hidden_directory(output: str | Path) -> Path:
    """Return where unfinished work on an output is recorded, unless the user chooses: hidden, next to it."""
    path = Path(os.path.abspath(output))
    return path.parent / f".{path.name}.unfinished"


def remove_records(directory: Path | None) -> None:
    """Let nothing resume from a run's directory, which is removed when its [`run_directory`] ends."""
    if directory is not None:
        (directory / IDENTITY).unlink(missing_ok=True)


def checksum_ids(ids: torch.Tensor) -> str:
    """Return a checksum of token ids, int64."""
    return hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest()


def checksum(model: PreTrainedModel, names: Sequence[str] = ()) -> str:
    """Return a checksum of a model's config and weights, and of the names of its projections.

    Only the first and last row of each matrix are read.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in hf_private.FILE_KEYS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr(list(names)).encode())
    for name, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            offloaded = hf_private.is_offloaded(module)
            weight = hf_private.offload_hook(module).weights_map[local] if offloaded else parameter
            if weight.is_meta:
                continue
            digest.update(f"{name}.{local} {tuple(weight.shape)} {weight.dtype}".encode())
            places = [(end,) * (weight.ndim - 1) for end in (0, -1)]
            for row in (weight[place] for place in places):
                digest.update(row.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that decide its results."""
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
