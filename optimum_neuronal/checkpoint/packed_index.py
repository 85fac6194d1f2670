"""The files of a packed checkpoint (docs/format.md) together: compared with their index, with each other, and with a model."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .files import check_file, check_names, read_json
from .names import PACKED, PACKED_INDEX, PACKED_SHARD, shard
from .packed_reading import PackedFile
from .schema import short


def open_checkpoint(folder: str | Path) -> list[PackedFile]:
    """The files of a packed checkpoint, whose names and headers have been compared with its index and with each other.

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
            f"{index} tells of {short(total)} bytes of tensors, but its files hold {found}: tensors are missing."
        )
    return files


def check_shapes(files: Iterable[PackedFile], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises `ValueError` if a packed weight does not fit into the model that it is for.

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
    """The index of a packed checkpoint.

    Returns:
        `tuple`: name of every stored tensor -> name of its file, beside the index; and the bytes of all tensors that it
        tells, which are not checked.

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
