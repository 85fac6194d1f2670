"""A checkpoint's files, dense or packed, without a model: what they hold, and every weight, one after the other.

A checkpoint may come from anywhere, so nothing that its files say is believed before it was compared with what is there.
"""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from .names import CONFIG, DENSE_FILE, DENSE_INDEX, LISTED_FILE, PACKED_INDEX, WEIGHT_FILES, is_of_weights
from .packed_index import open_checkpoint, read_index
from .packed_reading import DTYPES, PackedFile
from .sparsity_config import read_sparsity_config


LARGEST_JSON = 50 * 10**6  # bytes; an index of half a million tensors
PIECE = 2**24  # elements that are read at a time


@dataclass(frozen=True)
class Weight:
    """A weight in a checkpoint's files.

    Args:
        name (`str`): in the dense checkpoint.
        shape (`tuple[int, ...]`), dtype (`torch.dtype`): of the weight, unpacked.
        stored_bytes (`int`): what it takes in the file.
        file: the opened file: `safe_open`, or a [`PackedFile`].
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_bytes: int
    file: Any

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        """What it takes unpacked."""
        return self.numel * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The whole weight, on the CPU. Raises `ValueError` if it is damaged."""
        return self.file.get_tensor(self.name)

    def pieces(self) -> Iterator[torch.Tensor]:
        """The weight in pieces along its first dimension, each small unless the weight is packed."""
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
        config (`dict`): what config.json holds.
        sparsity_config (`dict`, *optional*): how it was pruned; None if it was not.
        format (`str`): `"dense"` or `"packed"`.
        files (`list[Path]`): of weights.
        weights (`list[Weight]`): in the order of the files.

    Raises:
        `ValueError`: the checkpoint is damaged, or its files want to be read from elsewhere.
        `OSError`: a file is missing or cannot be read.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise NotADirectoryError(f"{directory} is no directory: expected one with a model's files.")
        self.config = read_json(self.directory, CONFIG)
        try:
            self.sparsity_config = read_sparsity_config(self.config)
        except ValueError as error:
            raise ValueError(f"{self.directory / CONFIG}: {error}") from error
        self.format = self._format()
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

    def _format(self) -> str:
        quantization = self.config.get("quantization_config")
        packed = isinstance(quantization, dict) and quantization.get("quant_method") == "neuronal"
        found = "packed" if packed else "dense"
        if self.sparsity_config and self.sparsity_config["format"] != found:
            raise ValueError(
                f"{self.directory / CONFIG} contradicts itself: sparsity_config.format is "
                f"{self.sparsity_config['format']!r}, but its quantization_config is that of a {found} checkpoint."
            )
        return found

    def _packed(self) -> list[tuple[Path, list[Weight]]]:
        check_file(self.directory, PACKED_INDEX)
        for name in sorted(set(read_index(self.directory / PACKED_INDEX).values())):
            check_file(self.directory, name)
        return [
            (
                file.path,
                [
                    Weight(
                        name, stored.shape, DTYPES[stored.values.dtype],
                        stored.values.nbytes + (stored.mask.nbytes if stored.mask else 0), file,
                    )
                    for name, stored in file.weights.items()
                ],
            )
            for file in open_checkpoint(self.directory)
        ]  # fmt: skip

    def _dense(self, opened: ExitStack) -> list[tuple[Path, list[Weight]]]:
        pairs = []
        for name, expected in self._dense_files().items():
            path = check_file(self.directory, name)
            try:
                file = opened.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error
            names = set(file.keys())
            if expected is not None and (different := names ^ expected):
                raise ValueError(
                    f"{self.directory / DENSE_INDEX} and {path} do not name the same tensors: {min(different)!r} is in one of "
                    "them only."
                )
            pairs.append((path, [self._dense_weight(path, file, key) for key in sorted(names)]))
        return pairs

    def _dense_files(self) -> dict[str, set[str] | None]:
        """Name of a file -> names of its tensors, as far as they are told."""
        if (self.directory / DENSE_FILE).exists() or not (self.directory / DENSE_INDEX).exists():
            return {DENSE_FILE: None}
        weight_map = read_json(self.directory, DENSE_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(
                f"{self.directory / DENSE_INDEX} is damaged: its 'weight_map' is no object with names of tensors."
            )
        files: dict[str, set[str] | None] = {}
        for key, name in weight_map.items():
            if not isinstance(name, str) or not LISTED_FILE.fullmatch(name):
                raise ValueError(
                    f"{self.directory / DENSE_INDEX} says that {key!r} lies in {name!r}: expected the name of a .safetensors file "
                    "in the same directory."
                )
            files.setdefault(name, set()).add(key)
        return files

    @staticmethod
    def _dense_weight(path: Path, file: Any, name: str) -> Weight:
        part = file.get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {part.get_dtype()}: expected one of {', '.join(DTYPES)}.")
        shape, dtype = tuple(part.get_shape()), DTYPES[part.get_dtype()]
        return Weight(name, shape, dtype, math.prod(shape) * dtype.itemsize, file)


def stored_size(directory: str | Path) -> int:
    """Bytes of all files of weights in a directory."""
    return sum(entry.stat().st_size for entry in Path(directory).glob("*") if is_of_weights(entry.name))


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object that a JSON file of a checkpoint holds. Raises `ValueError` if it is damaged or absurdly large."""
    path = check_file(directory, name)
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than any such file needs: it is damaged.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON text ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no object.")
    return value


def check_file(directory: Path, name: str) -> Path:
    """The path of a checkpoint's file.

    Raises:
        `FileNotFoundError`: there is none.
        `ValueError`: it is no file, or a link out of the directory. (In the Hub's cache files are links to its blobs.)
    """
    path, home = directory / name, Path(directory).resolve()
    if not path.exists():
        raise FileNotFoundError(f"{directory} has no file {name}: expected a model saved with save_pretrained.")
    place = path.resolve()
    in_cache = home.parent.name == "snapshots" and place.parent == home.parent.parent / "blobs"
    if not in_cache and home not in place.parents:
        raise ValueError(f"{path} is a link to {place}, outside of the directory: put the file itself there.")
    if not place.is_file():
        raise ValueError(f"{path} is no file.")
    return path


def find_checkpoint(directory_or_id: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The directory of a checkpoint; of one on the Hub, downloads its config and weights into the cache.

    Raises:
        `ValueError`: neither a directory nor the id of a repository.
        `OSError`: it does not exist, may not be read, or the network fails.
    """
    if Path(directory_or_id).is_dir():
        return Path(directory_or_id)
    try:
        found = snapshot_download(
            str(directory_or_id), revision=revision, token=token, allow_patterns=[CONFIG, *WEIGHT_FILES]
        )
    except HFValidationError as error:
        raise ValueError(f"{directory_or_id} is neither a directory nor the id of a model on the Hub.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise OSError(
            f"{directory_or_id} is no directory, and could not be had from the Hub: {error} If it is private, log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    return Path(found)
