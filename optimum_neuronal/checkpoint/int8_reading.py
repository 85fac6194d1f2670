"""A matrix of a packed checkpoint in 8 bits (docs/format.md): found by its header, read and checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..formats.bitmask import checksum_seed
from ..formats.code_checks import GROUP
from ..formats.int8_weight import BITS, LEVELS, SCALES, Int8Weight, check_int8_headers
from .stored_tensors import DTYPES, Stored, dtype_name, read_parts


INT8_PARTS = (LEVELS, SCALES)  # in this order the checksum goes over them


@dataclass(frozen=True)
class StoredInt8Weight:
    """A matrix in a file in 8 bits. Indexing reads, checks and unpacks it.

    Args:
        path (`Path`), name (`str`): of the file, and of the weight in the dense checkpoint.
        shape (`tuple[int, ...]`): of the weight.
        checksum (`int`): see docs/format.md.
        parts (`tuple[Stored, ...]`): levels and scales.
        dtype (`torch.dtype`): of the weight.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    checksum: int
    parts: tuple[Stored, ...]
    dtype: torch.dtype

    @classmethod
    def of_header(
        cls, path: Path, name: str, facts: Mapping[str, Any], parts: Sequence[Stored], checksum: int
    ) -> "StoredInt8Weight":
        """The weight that a file's metadata tells of. Raises `ValueError`, without its name, if headers do not agree."""
        expected = {"mask": False, "bits": BITS, "group": GROUP}
        for key, value in expected.items():
            if type(facts.get(key)) is not type(value) or facts[key] != value:
                raise ValueError(f"its {key!r} is {facts.get(key)!r}: expected {value!r} of a matrix without a mask")
        shape, dtype = facts.get("shape"), facts.get("dtype")
        kind = DTYPES.get(dtype) if isinstance(dtype, str) else None
        check_int8_headers(shape, kind, [(DTYPES[part.dtype], part.shape) for part in parts])
        return cls(path, name, tuple(shape), checksum, tuple(parts), kind)

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return sum(part.nbytes for part in self.parts)

    @property
    def kept(self) -> int:
        """How many elements are kept: all."""
        return math.prod(self.shape)

    def get_shape(self) -> list[int]:
        """The shape of the weight, unpacked."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype as safetensors calls it: `"BF16"`."""
        return dtype_name(self.dtype)

    def __getitem__(self, index) -> torch.Tensor:
        return self.read_int8().unpack()[index]

    def read_int8(self) -> Int8Weight:
        """The weight as it is stored, checked."""
        seed = int8_seed(self.name, self.get_dtype(), self.shape)
        try:
            weight = Int8Weight.of_parts(read_parts(self.path, self.parts, seed, self.checksum), self.name, self.dtype)
            weight.check()
        except ValueError as error:
            raise ValueError(f"{self.path}: {self.name} is damaged: {error}.") from error
        return weight


def int8_seed(name: str, dtype: str, shape: Sequence[int]) -> int:
    """CRC-32 of what the header says of a matrix in 8 bits, as [`checksum_seed`] has it of others."""
    return checksum_seed(name, f"{dtype} {BITS} bits without mask", shape)
