"""Reads packed checkpoints (docs/format.md): each file as if it were a dense one, and all files compared with their index.

Nothing that a header says is believed before it was compared with the file's size. All errors are `ValueError`s that name
the file and the tensor.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .names import PACKED, PACKED_INDEX, PACKED_SHARD, shard
from .safe_files import check_file, check_names, open_safetensors, read_json
from .schema import short
from .stored_format import VERSION
from .stored_tensors import DTYPES, Stored
from .stored_weights import StoredCodedWeight, StoredInt8Weight, StoredPackedWeight, StoredWeight


METADATA = "neuronal"  # key in a shard's metadata


class PackedFile:
    """A file of a packed checkpoint, with the names, shapes and whole weights of a dense one.

    Opening it reads and checks the header alone. It offers what transformers uses of `safetensors.safe_open`.

    Args:
        path (`str` or `Path`): of the file.

    Attributes:
        weights (`dict[str, StoredWeight]`): by their names in the dense checkpoint.

    Raises:
        `ValueError`: it is no such file, or it is damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        stored, about = _read_header(self.path)
        self.weights = {name: self._weight(name, facts, stored) for name, facts in about.items()}
        if stored:
            raise ValueError(f"{path} holds the tensor {min(stored)!r}, which its metadata does not know.")

    def _weight(self, name: str, facts: Any, stored: dict[str, Stored]) -> StoredWeight:
        """Return a weight, and take its tensors out of `stored`."""
        if not isinstance(facts, dict) or not re.fullmatch("[0-9a-f]{8}", str(facts.get("crc32"))):
            raise ValueError(
                f"{self.path}: the metadata of {name!r} is {short(facts)}: expected a 'crc32' of 8 hex digits."
            )
        kind: type[StoredWeight] = StoredPackedWeight if "shape" in facts else StoredWeight
        if "bits" in facts:
            kind = StoredInt8Weight if "mask" in facts else StoredCodedWeight
        for end in kind.ends:
            if name + end not in stored:
                raise ValueError(f"{self.path} has no tensor {name + end!r}, which its metadata names: it is damaged.")
        parts = [stored.pop(name + end) for end in kind.ends]
        try:
            return kind.of_header(self.path, name, facts, parts, int(facts["crc32"], 16))
        except ValueError as error:
            raise ValueError(f"{self.path}: {name} cannot be unpacked: {error}.") from error

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are stored."""
        return sum(weight.stored_bytes for weight in self.weights.values())

    @property
    def tensors(self) -> set[str]:
        """Names of the tensors that are stored, as in the index."""
        return {part.name for weight in self.weights.values() for part in weight.parts}

    def keys(self) -> list[str]:
        """Return the names of the weights, as in the dense checkpoint."""
        return list(self.weights)

    def get_slice(self, name: str) -> StoredWeight:
        """Return a weight that is read when it is indexed: `file.get_slice(name)[...]`."""
        return self.weights[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a weight, on the CPU."""
        return self.weights[name][...]

    def metadata(self) -> dict[str, str]:
        """Return what transformers looks for in a safetensors file."""
        return {"format": "pt"}

    def __enter__(self) -> "PackedFile":
        return self

    def __exit__(self, *_) -> None:
        """Do nothing: no file is left open between two reads."""


def _read_header(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return the tensors of a file by name, and its metadata of every weight."""
    with open_safetensors(check_file(path.parent, path.name)):  # so that what follows may believe the header
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    try:
        about = json.loads(header.pop("__metadata__")[METADATA])
        version, weights = about["version"], about["tensors"]
        names = list(weights.items())
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no file of a packed checkpoint: its metadata lack {METADATA!r}, or it is damaged."
        ) from error
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} has version {short(version)} of the packed format, but this optimum_neuronal reads {VERSION}: install "
            "another one."
        )
    check_names(path, [*header, *weights])
    stored = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {entry['dtype']}: expected one of {', '.join(DTYPES)}.")
        first, last = entry["data_offsets"]
        stored[name] = Stored(name, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first)
    return stored, dict(names)


def open_checkpoint(folder: str | Path) -> list[PackedFile]:
    """Return the files of a packed checkpoint. Names and headers are compared with its index and with each other.

    Args:
        folder (`str` or `Path`): with the index and all files.

    Raises:
        `ValueError`: the checkpoint is damaged.
        `OSError`: a file is missing or cannot be read.
    """
    index = Path(folder) / PACKED_INDEX
    weight_map, total = read_index(index)
    names: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        names.setdefault(file_name, set()).add(name)
    files = [PackedFile(index.with_name(file_name)) for file_name in sorted(names)]
    for file in files:
        if different := file.tensors ^ names[file.path.name]:
            raise ValueError(
                f"{index} and {file.path} do not name the same tensors: {min(different)!r} is in one of them only."
            )
    found = sum(file.nbytes for file in files)
    if total != found:
        raise ValueError(
            f"{index} names {short(total)} bytes of tensors, but its files hold {found}: tensors are missing."
        )
    return files


def check_shapes(files: Iterable[PackedFile], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` if a packed weight does not fit into its model.

    Args:
        files (`Iterable[PackedFile]`): of the checkpoint.
        parameters (`Mapping[str, Tensor]`): the model's by name, on any device. Where transformers makes a parameter of
            several tensors, so that their names differ, none may be larger than the largest parameter.
    """
    largest = max(parameter.numel() for parameter in parameters.values())
    for file in files:
        for name, weight in file.weights.items():
            parameter = parameters.get(name)
            if parameter is not None and tuple(parameter.shape) != weight.shape:
                raise ValueError(
                    f"{file.path}: {name} has the shape {weight.shape}, but the model's {tuple(parameter.shape)}."
                )
            if parameter is None and math.prod(weight.shape) > largest:
                raise ValueError(
                    f"{file.path}: {name} has the shape {weight.shape}, larger than any weight of the model."
                )


def read_index(path: str | Path) -> tuple[dict[str, str], Any]:
    """Read the index of a packed checkpoint.

    Returns:
        `tuple`: name of every stored tensor -> name of its file, beside the index; and the bytes of all tensors that it
        names, which are not checked.

    Raises:
        `ValueError`: it is damaged, or names files that a packed checkpoint does not have, or that are none.
        `FileNotFoundError`: a file is missing.
    """
    index = read_json(Path(path).parent, Path(path).name)
    try:
        weight_map, total = index["weight_map"], index["metadata"]["total_size"]
        files = set(weight_map.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: it is no index with a 'weight_map' and a 'total_size'.") from error
    if not files:
        raise ValueError(f"{path} is damaged: it names no tensor.")
    check_names(Path(path), weight_map)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not PACKED_SHARD.fullmatch(file):
            raise ValueError(f"{path} says that {name!r} lies in {short(file)}: expected {shard(PACKED, 1, 1)!r}.")
    expected = {shard(PACKED, number, len(files)) for number in range(1, len(files) + 1)}
    if files != expected:
        raise ValueError(f"{path} names the files {sorted(files)}: expected {sorted(expected)}.")
    for name in sorted(files):
        check_file(Path(path).parent, name)
    return weight_map, total
