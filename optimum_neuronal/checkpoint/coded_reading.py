"""A weight of a packed checkpoint whose kept values are few-bit codes (docs/format.md): found by its header, read and checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..formats.bitmask import MASK, check_mask_header, checksum_seed
from ..formats.code_checks import check_coded_headers
from ..formats.coded import CODES, SCALES, TABLE, CodedWeight
from .stored_tensors import DTYPES, Stored, dtype_name, read_parts


CODED_PARTS = (MASK, CODES, SCALES, TABLE)  # in this order the checksum goes over them


@dataclass(frozen=True)
class StoredCodedWeight:
    """A coded weight in a file. Indexing reads, checks and unpacks it.

    Args:
        path (`Path`), name (`str`): of the file, and of the weight in the dense checkpoint.
        shape (`tuple[int, ...]`): of the weight.
        checksum (`int`): see docs/format.md.
        parts (`tuple[Stored, ...]`): mask, codes, scales and table.
        bits (`int`): of each code.
        dtype (`torch.dtype`): of the weight.
        transposed (`bool`): whether its last two dimensions were exchanged before it was coded.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    checksum: int
    parts: tuple[Stored, ...]
    bits: int
    dtype: torch.dtype
    transposed: bool

    @classmethod
    def of_header(
        cls, path: Path, name: str, facts: Mapping[str, Any], parts: Sequence[Stored], checksum: int
    ) -> "StoredCodedWeight":
        """The weight that a file's metadata tells of. Raises `ValueError`, without its name, if headers do not agree."""
        headers = [(DTYPES[part.dtype], part.shape) for part in parts]
        shape, transposed = facts.get("shape"), facts.get("transposed", False)
        check_mask_header(shape, headers[0][1], headers[0][0])
        if type(transposed) is not bool:
            raise ValueError(f"its 'transposed' is {transposed!r}: expected true or false")
        dtype = DTYPES.get(facts["dtype"]) if isinstance(facts.get("dtype"), str) else None
        check_coded_headers(_as_coded(shape, transposed), facts["bits"], facts.get("group"), dtype, headers)
        return cls(path, name, tuple(shape), checksum, tuple(parts), facts["bits"], dtype, transposed)

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return sum(part.nbytes for part in self.parts)

    @property
    def kept(self) -> int:
        """About how many elements are kept: no fewer than there are codes for."""
        return min(math.prod(self.shape), self.parts[1].nbytes * 8 // self.bits)

    def get_shape(self) -> list[int]:
        """The shape of the weight, unpacked."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype as safetensors calls it: `"BF16"`."""
        return dtype_name(self.dtype)

    def __getitem__(self, index) -> torch.Tensor:
        _, dense = self._read()
        return dense[index]

    def read_coded(self) -> CodedWeight:
        """The weight as it is stored, of a transposed one the transposed; checked as one that is unpacked."""
        coded, _ = self._read()
        return coded

    def _read(self) -> tuple[CodedWeight, torch.Tensor]:
        """The weight as it is stored, and unpacked."""
        seed = coded_seed(self.name, self.get_dtype(), self.shape, self.bits, self.transposed)
        try:
            tensors = read_parts(self.path, self.parts, seed, self.checksum)
            shape = tuple(_as_coded(self.shape, self.transposed))
            coded = CodedWeight.of_parts(tensors, self.name, shape, self.bits, self.dtype)
            dense = coded.unpack()
        except ValueError as error:
            raise ValueError(f"{self.path}: {self.name} is damaged: {error}.") from error
        return coded, dense.mT.contiguous() if self.transposed else dense


def coded_seed(name: str, dtype: str, shape: Sequence[int], bits: int, transposed: bool) -> int:
    """CRC-32 of what the header says of a coded weight, as [`checksum_seed`] has it of others."""
    return checksum_seed(name, f"{dtype} {bits} bits{' transposed' if transposed else ''}", shape)


def _as_coded(shape: Sequence[int], transposed: bool) -> list[int]:
    return [*shape[:-2], shape[-1], shape[-2]] if transposed else list(shape)
