"""Reads packed checkpoints (docs/format.md): each file as if it were a dense one, and all files compared with their index.

Nothing that a header says is believed before it was compared with the file's size. All errors are `ValueError`s that name
the file and the tensor.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .names import PACKED, PACKED_INDEX, shard
from .safe_files import check_file, check_names, read_index
from .schema import short
from .stored_format import VERSION
from .stored_tensors import Stored, read_header
from .stored_weights import StoredPackedWeight, StoredWeight, part_names


METADATA = "neuronal"  # key in a shard's metadata


class PackedFile:
    """A file of a packed checkpoint, with the names, shapes and whole weights of a dense one.

    It offers what transformers uses of `safetensors.safe_open`.

    Args:
        path (`Path`): of the file.
        weights (`Mapping[str, Any]`): by their names in the dense checkpoint; indexing one reads it.
    """

    def __init__(self, path: Path, weights: Mapping[str, Any]):
        self.path, self.weights = path, weights

    @classmethod
    def open(cls, path: str | Path) -> "PackedFile":
        """Read and check a file's header alone: its weights are [`StoredWeight`]s. Raise `ValueError` if it is damaged."""
        path = Path(path)
        stored, metadata = read_header(path)
        facts = _read_facts(path, metadata)
        check_names(path, facts)
        weights = {name: _take_weight(path, name, facts[name], stored) for name in facts}
        if stored:
            raise ValueError(f"{path} holds the tensor {min(stored)!r}, which its metadata does not know.")
        return cls(path, weights)

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

    def get_slice(self, name: str) -> Any:
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


def _read_facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file's metadata say of each weight, by name."""
    try:
        about = json.loads(metadata[METADATA])
        version, weights = about["version"], dict(about["tensors"].items())
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no file of a packed checkpoint: its metadata lack {METADATA!r}, or it is damaged."
        ) from error
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} has version {short(version)} of the packed format, but this optimum_neuronal reads {VERSION}: install "
            "another one."
        )
    return weights


def _take_weight(path: Path, name: str, facts: Any, stored: dict[str, Stored]) -> StoredWeight:
    """Return a weight, and take its tensors out of `stored`."""
    if not isinstance(facts, dict) or not re.fullmatch("[0-9a-f]{8}", str(facts.get("crc32"))):
        raise ValueError(f"{path}: the metadata of {name!r} is {short(facts)}: expected a 'crc32' of 8 hex digits.")
    needed, optional, kind = [name], [], StoredWeight
    try:
        if "format" in facts:
            (needed, optional), kind = part_names(facts["format"], name), StoredPackedWeight
        for part in needed:
            if part not in stored:
                raise ValueError(f"the file has no tensor {part!r}")
        parts = [stored.pop(part) for part in (*needed, *(part for part in optional if part in stored))]
        return kind.of_header(path, name, facts, parts, int(facts["crc32"], 16))
    except ValueError as error:
        raise ValueError(f"{path}: {name} is damaged: {error}.") from error


def open_checkpoint(folder: str | Path) -> list[PackedFile]:
    """Return the files of a packed checkpoint. Names and headers are compared with its index and with each other.

    Args:
        folder (`str` or `Path`): with the index and all files.

    Raises:
        `ValueError`: the checkpoint is damaged.
        `OSError`: a file is missing or cannot be read.
    """
    folder = Path(folder)
    listed, total = read_packed_index(folder)
    files = [PackedFile.open(folder / name) for name in sorted(listed)]
    for file in files:
        check_tensors(file.path, file.tensors, folder / PACKED_INDEX, listed[file.path.name])
    found = sum(file.nbytes for file in files)
    if total != found:
        raise ValueError(
            f"{folder / PACKED_INDEX} names {short(total)} bytes of tensors, but its files hold {found}: tensors are missing."
        )
    return files


def read_packed_index(folder: Path) -> tuple[dict[str, set[str]], Any]:
    """Read the index of a packed checkpoint, see [`read_index`]; its files are numbered without a gap."""
    files, total = read_index(folder, PACKED_INDEX)
    expected = {shard(PACKED, number, len(files)) for number in range(1, len(files) + 1)}
    if different := files.keys() ^ expected:
        raise ValueError(
            f"{folder / PACKED_INDEX} names {len(files)} files: expected {shard(PACKED, 1, len(files))!r} and so on, but "
            f"{min(different)!r} is in one of the two lists only."
        )
    for file in files:
        check_file(folder, file)
    return files, total


def check_tensors(path: Path, found: set[str], index: Path, listed: set[str]) -> None:
    """Raise `ValueError` if a file holds other tensors than the index lists for it."""
    if different := found ^ listed:
        raise ValueError(
            f"{index} and {path} do not name the same tensors: {min(different)!r} is in one of them only."
        )


def check_fit(weights: Iterable[StoredWeight], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` if a weight does not fit into its model: by its shape, or as integers where floats belong.

    Args:
        weights (`Iterable[StoredWeight]`): of the checkpoint.
        parameters (`Mapping[str, Tensor]`): the model's by name, on any device. Where transformers makes a parameter of
            several tensors, so that their names differ, none may be larger than the largest parameter.
    """
    largest = max(parameter.numel() for parameter in parameters.values())
    for weight in weights:
        parameter = parameters.get(weight.name)
        if parameter is not None and tuple(parameter.shape) != weight.shape:
            raise ValueError(
                f"{weight.path}: {weight.name} has the shape {weight.shape}, but the model's {tuple(parameter.shape)}."
            )
        if parameter is not None and parameter.is_floating_point() and not weight.dtype.is_floating_point:
            raise ValueError(
                f"{weight.path}: {weight.name} has the dtype {weight.get_dtype()}, but the model's is a floating-point weight: "
                "the checkpoint is damaged. Download or save it again."
            )
        if parameter is None and weight.numel > largest:
            raise ValueError(
                f"{weight.path}: {weight.name} has the shape {weight.shape}, larger than any weight of the model."
            )
