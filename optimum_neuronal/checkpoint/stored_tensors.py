"""Tensors of a safetensors file: described by its header, and read piece by piece."""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .safe_files import check_file, check_header


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


class FileValues:
    """The elements of a stored tensor in their order, read piece by piece. The checksum, if there is one, goes over them."""

    def __init__(self, file: BinaryIO, stored: Stored, checksum: int | None):
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
        if self.checksum is not None:
            self.checksum = zlib.crc32(buffer, self.checksum)
        return tensor


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return the tensors of a checkpoint's file by name, in order, and its metadata.

    Raises:
        `ValueError`: the file is damaged, or no regular file in its directory; or a dtype is not known.
        `FileNotFoundError`: there is none.
    """
    check_header(check_file(path.parent, path.name))  # so that what follows may believe the header
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    metadata, stored = header.pop("__metadata__", {}), {}
    for name in sorted(header):
        entry = header[name]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {entry['dtype']}: expected one of {', '.join(DTYPES)}.")
        first, last = entry["data_offsets"]
        stored[name] = Stored(name, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first)
    return stored, metadata


def checksum_seed(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the CRC-32 of what the header says of a tensor. The checksum of its bytes goes on from it.

    Args:
        name (`str`): of the tensor, or of the weight that is packed.
        dtype (`str`): as safetensors writes it: `"BF16"`.
        shape (`Sequence[int]`): of the tensor; of a packed weight, unpacked.
    """
    return zlib.crc32(f"{name} {dtype} {'x'.join(map(str, shape))}".encode())
