"""Tensors of a safetensors file: described by its header, and read piece by piece under a checksum."""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ..formats.bitmask import Values


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # `"BF16"`, as safetensors calls them


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file as its header describes it.

    Args:
        name (`str`), dtype (`str`): as in the header; dtypes are called `"BF16"`, `"U8"`, ...
        shape (`tuple[int, ...]`): of the tensor.
        offset (`int`), nbytes (`int`): where its bytes lie in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class FileValues(Values):
    """The elements of a stored tensor in their order, read piece by piece; the checksum grows with each."""

    def __init__(self, file: BinaryIO, stored: Stored, checksum: int):
        self.dtype = DTYPES[stored.dtype]
        self.checksum = checksum
        self._file, self._stored = file, stored

    def __len__(self) -> int:
        return math.prod(self._stored.shape)

    def __getitem__(self, piece: slice) -> torch.Tensor:
        tensor = torch.empty(piece.stop - piece.start, dtype=self.dtype)
        if not len(tensor):
            return tensor
        buffer = tensor.view(torch.uint8).numpy()
        self._file.seek(self._stored.offset + piece.start * tensor.element_size())
        if self._file.readinto(buffer) != len(buffer):
            raise ValueError("the file ends in the middle of it")
        self.checksum = zlib.crc32(buffer, self.checksum)
        return tensor


def read_parts(path: Path, parts: Iterable[Stored], seed: int, checksum: int) -> dict[str, torch.Tensor]:
    """Return whole tensors of a file by name.

    Args:
        path (`Path`): of the file.
        parts (`Iterable[Stored]`): the tensors, in the order in which the checksum goes over them.
        seed (`int`): the CRC-32 that goes before them.
        checksum (`int`): the CRC-32 of all.

    Raises:
        `ValueError`: the file ends too early, or the checksum does not agree.
    """
    tensors = {}
    with path.open("rb") as file:
        for part in parts:
            values = FileValues(file, part, seed)
            tensors[part.name] = values[0 : len(values)].view(part.shape)
            seed = values.checksum
    check_checksum(seed, checksum)
    return tensors


def check_checksum(found: int, written: int) -> None:
    """Raise `ValueError` if a checksum is not the one that was written."""
    if found != written:
        raise ValueError(
            f"its checksum is {found:08x}, but {written:08x} was written. Download or save the checkpoint again"
        )
