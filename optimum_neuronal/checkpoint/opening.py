"""Opens a checkpoint, dense or packed, without a model, and reads its weights one after the other.

A checkpoint may come from anywhere, so nothing that its files say is believed before it was checked.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ..validation import check_path
from .names import CONFIG, DENSE_INDEX, FOREIGN_SUFFIXES, WEIGHT_FILES, is_of_weights
from .packed_reading import PackedFile, open_checkpoint
from .safe_files import dense_files, open_dense, read_json
from .sparsity_config import read_sparsity_config
from .stored_format import stored_format
from .stored_tensors import DTYPES
from .stored_weights import StoredCodedWeight, StoredInt8Weight


PIECE = 2**24  # elements that are read at a time


@dataclass(frozen=True)
class Weight:
    """A weight in a checkpoint's files.

    Args:
        name (`str`): in the dense checkpoint.
        shape (`tuple[int, ...]`), dtype (`torch.dtype`): of the weight, unpacked.
        stored_bytes (`int`): bytes that it takes in the file.
        file: the opened file: `safe_open`, or a [`PackedFile`].
        is_coded (`bool`): True if it is stored with quantised values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_bytes: int
    file: Any
    is_coded: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        """Bytes that it takes unpacked."""
        return self.numel * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Return the whole weight, on the CPU. Raise `ValueError` if it is damaged."""
        return self.file.get_tensor(self.name)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the weight in pieces along its first dimension, each small unless the weight is packed."""
        if isinstance(self.file, PackedFile) or self.numel <= PIECE:
            yield self.read()
            return
        part, rows = self.file.get_slice(self.name), max(1, PIECE * self.shape[0] // self.numel)
        for start in range(0, self.shape[0], rows):
            yield part[start : start + rows]


class Checkpoint:
    """The files in a directory. Opening them reads and checks all headers, and no weight.

    ```python
    with Checkpoint(directory) as checkpoint:
        for weight in checkpoint.weights: ...
    ```

    Args:
        directory (`str` or `Path`): of the checkpoint.

    Attributes:
        config (`dict`): content of config.json.
        sparsity_config (`dict`, *optional*): how it was pruned; None if it was not.
        format (`str`): `"dense"` or `"packed"`.
        files (`list[Path]`): of weights.
        weights (`list[Weight]`): in the order of the files.

    Raises:
        `ValueError`: the checkpoint is damaged, or names files elsewhere.
        `OSError`: a file is missing or cannot be read.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise NotADirectoryError(f"{directory} is no directory: expected one with a model's files.")
        self.config = read_json(self.directory, CONFIG)
        try:
            self.sparsity_config = read_sparsity_config(self.config)
            self.format = stored_format(self.config, self.sparsity_config)
        except ValueError as error:
            raise ValueError(f"{self.directory / CONFIG}: {error}") from error
        self._open = ExitStack()
        with ExitStack() as opened:
            pairs = self._packed() if self.format == "packed" else self._dense(opened)
            self.weights = [weight for _, weights in pairs for weight in weights]
            self.files = [path for path, _ in pairs]
            self._open = opened.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_) -> None:
        self._open.close()

    def _packed(self) -> list[tuple[Path, list[Weight]]]:
        return [
            (file.path, [self._packed_weight(file, name) for name in file.keys()])  # noqa: SIM118
            for file in open_checkpoint(self.directory)
        ]

    @staticmethod
    def _packed_weight(file: PackedFile, name: str) -> Weight:
        stored = file.weights[name]
        is_coded = isinstance(stored, (StoredCodedWeight, StoredInt8Weight))
        return Weight(name, stored.shape, stored.dtype, stored.stored_bytes, file, is_coded)

    def _dense(self, opened: ExitStack) -> list[tuple[Path, list[Weight]]]:
        pairs = []
        for name, expected in dense_files(self.directory).items():
            path = self.directory / name
            file = opened.enter_context(open_dense(path))
            names = set(file.keys())
            if expected is not None and (different := names ^ expected):
                raise ValueError(
                    f"{self.directory / DENSE_INDEX} and {path} do not name the same tensors: {min(different)!r} is in one of "
                    "them only."
                )
            pairs.append((path, [self._dense_weight(path, file, key) for key in sorted(names)]))
        return pairs

    @staticmethod
    def _dense_weight(path: Path, file: Any, name: str) -> Weight:
        part = file.get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {part.get_dtype()}: expected one of {', '.join(DTYPES)}.")
        shape, dtype = tuple(part.get_shape()), DTYPES[part.get_dtype()]
        return Weight(name, shape, dtype, math.prod(shape) * dtype.itemsize, file)


def stored_size(directory: str | Path) -> int:
    """Return the bytes of all files of weights in a directory."""
    return sum(entry.stat().st_size for entry in Path(directory).glob("*") if is_of_weights(entry.name))


def find_checkpoint(
    directory_or_id: str | Path, revision: str | None = None, token: str | None = None, whole: bool = False
) -> Path:
    """Return the directory of a checkpoint; download the config and weights of one on the Hub into the cache.

    Args:
        directory_or_id (`str` or `Path`): of the checkpoint.
        revision (`str`, *optional*): branch, tag or commit on the Hub. None: main.
        token (`str`, *optional*): None: the one of `hf auth login`, or HF_TOKEN.
        whole (`bool`): download all files, but for other tools' weights.

    Raises:
        `ValueError`: neither a directory nor the id of a repository.
        `OSError`: it does not exist, may not be read, or the network fails.
    """
    check_path("directory_or_id", directory_or_id)
    if Path(directory_or_id).is_dir():
        return Path(directory_or_id)
    try:
        found = snapshot_download(
            str(directory_or_id),
            revision=revision,
            token=token,
            allow_patterns=None if whole else [CONFIG, *WEIGHT_FILES],
            ignore_patterns=[f"*{suffix}" for suffix in FOREIGN_SUFFIXES],
        )
    except HFValidationError as error:
        raise ValueError(f"{directory_or_id} is neither a directory nor the id of a model on the Hub.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise OSError(
            f"{directory_or_id} is no directory, and could not be had from the Hub: {error} If it is private, log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    return Path(found)
