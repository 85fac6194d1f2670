"""Weights in the files of a checkpoint: described by headers, read and checked one at a time.

Nothing that a header says is believed before it was compared with the file's size. All errors are `ValueError`s that name
the file and the weight. docs/format.md describes the files of packed checkpoints.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..packed.formats.packed_matrix import FORMATS, PREFIX, PackedMatrix, check_shape, swapped
from ..packed.formats.quantized import QuantizedWeight
from ..packed.formats.quantized_checks import bits_of_codes
from .schema import short
from .stored_tensors import DTYPE_NAMES, DTYPES, FileValues, Stored, checksum_seed


PIECE = 2**24  # elements that are read at a time


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a file, stored as it is. Indexing reads and checks it.

    Args:
        path (`Path`), name (`str`): of the file, and of the weight in the dense checkpoint.
        shape (`tuple[int, ...]`), dtype (`torch.dtype`): of the weight, unpacked.
        checksum (`int`, *optional*): CRC-32, see docs/format.md; None in a dense checkpoint.
        parts (`tuple[Stored, ...]`): the tensors that it consists of, in the order of the checksum.
        transposed (`bool`): True if its last two dimensions were exchanged before it was packed.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int | None
    parts: tuple[Stored, ...]
    transposed: bool = False

    @classmethod
    def of_header(
        cls, path: Path, name: str, facts: Mapping[str, Any], parts: Sequence[Stored], checksum: int | None
    ) -> "StoredWeight":
        """Return the weight that a file's metadata describes. Raise `ValueError`, without its name, if headers disagree."""
        return cls(path, name, parts[0].shape, DTYPES[parts[0].dtype], checksum, tuple(parts))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return sum(part.nbytes for part in self.parts)

    @property
    def dense_bytes(self) -> int:
        """Bytes that it takes unpacked."""
        return self.numel * self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """True if it is stored packed."""
        return False

    @property
    def code_bits(self) -> int | None:
        """Bits of a code; None if it is not quantised."""
        return None

    def get_shape(self) -> list[int]:
        """Return the shape of the weight, unpacked."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors calls it: `"BF16"`."""
        return DTYPE_NAMES[self.dtype]

    def __getitem__(self, index) -> torch.Tensor:
        return self._read()[index]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the weight in pieces along its first dimension, each small unless the weight is packed."""
        if self.is_packed or self.numel <= PIECE:
            yield self._read()
            return
        row = self.numel // self.shape[0]
        step = max(1, PIECE // row) * row
        with self._named(), self.path.open("rb") as file:
            values = FileValues(file, self.parts[0], self._seed())
            for start in range(0, self.numel, step):
                yield values[start : min(start + step, self.numel)].view(-1, *self.shape[1:])
            self._check(values.checksum)

    def read_packed(self) -> PackedMatrix:
        """Return the weight as it is stored, checked. Raise `TypeError` if it is not packed."""
        raise TypeError(f"{self.path}: {self.name} is not packed.")

    def _read(self) -> torch.Tensor:
        """Return the dense weight. Raise `ValueError` if it is damaged."""
        with self._named():
            (tensor,) = self._read_parts().values()
        return tensor

    def _seed(self) -> int | None:
        """Return the CRC-32 of what the header says of it, None without a checksum."""
        return None if self.checksum is None else checksum_seed(self.name, self.get_dtype(), self.shape)

    def _read_parts(self) -> dict[str, torch.Tensor]:
        """Return whole tensors by their names in the file. Raise `ValueError` if they are damaged."""
        tensors, checksum = {}, self._seed()
        with self.path.open("rb") as file:
            for part in self.parts:
                values = FileValues(file, part, checksum)
                tensors[part.name] = values[0 : len(values)].view(part.shape)
                checksum = values.checksum
        self._check(checksum)
        return tensors

    def _check(self, found: int | None) -> None:
        """Raise `ValueError` if a checksum is not the one that was written."""
        if found != self.checksum:
            raise ValueError(
                f"its checksum is {found:08x}, but {self.checksum:08x} was written. Download or save the checkpoint again"
            )

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the names of file and weight to errors."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.path}: {self.name} is damaged: {error}.") from error


@dataclass(frozen=True)
class StoredPackedWeight(StoredWeight):
    """A packed weight. Indexing reads, checks and unpacks it.

    Args:
        format (`type[PackedMatrix]`): of it.
    """

    format: type[PackedMatrix] = PackedMatrix

    @classmethod
    def of_header(cls, path, name, facts, parts, checksum) -> "StoredPackedWeight":
        shape, transposed, dtype = facts.get("shape"), facts.get("transposed", False), _dtype(facts)
        check_shape(shape, dtype)
        if type(transposed) is not bool:
            raise ValueError(f"its 'transposed' is {short(transposed)}: expected true or false")
        format = FORMATS.get(facts["format"])
        headers = {_key(part.name, name): (DTYPES[part.dtype], part.shape) for part in parts}
        format.check_headers(swapped(shape, transposed), dtype, headers)
        return cls(path, name, tuple(shape), dtype, checksum, tuple(parts), transposed, format)

    @property
    def is_packed(self) -> bool:
        return True

    @property
    def code_bits(self) -> int | None:
        if not issubclass(self.format, QuantizedWeight):
            return None
        return bits_of_codes((DTYPES[self.parts[0].dtype], self.parts[0].shape))

    def read_packed(self) -> PackedMatrix:
        with self._named():
            tensors = {_key(name, self.name): tensor for name, tensor in self._read_parts().items()}
            weight = self.format.of_tensors(tensors, swapped(self.shape, self.transposed), self.dtype)
            weight.check()
        return weight

    def _read(self) -> torch.Tensor:
        dense = self.read_packed().unpack()
        return dense.mT.contiguous() if self.transposed else dense

    def _seed(self) -> int:
        return packed_seed(self.name, self.get_dtype(), self.shape, self.format.name, self.transposed)


def part_names(format: Any, name: str) -> tuple[list[str], list[str]]:
    """Return the names of the tensors of a weight in a file: those that have to be there, and those that may be.

    Raises:
        `ValueError`: there is no such format.
    """
    if format not in FORMATS.names():
        raise ValueError(f"its format is {short(format)}: expected one of {', '.join(FORMATS.names())}")
    kind = FORMATS.get(format)
    needed = [key for key in kind.names if key not in (*kind.optional, *kind.derived)]
    return [name + PREFIX + key for key in needed], [name + PREFIX + key for key in kind.optional]


def packed_seed(name: str, dtype: str, shape: Sequence[int], format: str, transposed: bool) -> int:
    """Return the CRC-32 of what the header says of a packed weight, see [`checksum_seed`]."""
    return checksum_seed(name, f"{dtype} {format}{' transposed' if transposed else ''}", shape)


def _key(part: str, name: str) -> str:
    """Return a tensor's name in its format, by its name in the file."""
    return part.removeprefix(name + PREFIX)


def _dtype(facts: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that the metadata of a weight name; None if it is not known."""
    return DTYPES.get(facts["dtype"]) if isinstance(facts.get("dtype"), str) else None
