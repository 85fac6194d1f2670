"""Weights in the files of a checkpoint: described by headers, read and checked one at a time.

Nothing that a header says is believed before it was compared with the file's size. All errors are `ValueError`s that name
the file and the weight. docs/format.md describes the files of packed checkpoints.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..formats.bitmask import MASK, VALUES, check_headers, check_mask, check_mask_header, checksum_seed, unpack
from ..formats.code_checks import GROUP, check_coded_headers
from ..formats.coded import CODES, SCALES, TABLE, CodedWeight
from ..formats.int8_weight import BITS, LEVELS, Int8Weight, check_int8_headers
from ..formats.packed import PackedMask, PackedWeight
from .stored_tensors import DTYPE_NAMES, DTYPES, FileValues, Stored


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

    ends: ClassVar[tuple[str, ...]] = ("",)  # of the names of its parts

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
    def kept(self) -> int | None:
        """How many elements are kept; None if it is not packed."""
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
        if self.kept is not None or self.numel <= PIECE:
            yield self._read()
            return
        row = self.numel // self.shape[0]
        step = max(1, PIECE // row) * row
        with self._named(), self.path.open("rb") as file:
            values = FileValues(file, self.parts[0], self._seed())
            for start in range(0, self.numel, step):
                yield values[start : min(start + step, self.numel)].view(-1, *self.shape[1:])
            self._check(values.checksum)

    def read_packed(self) -> PackedWeight | CodedWeight | Int8Weight:
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
    """A weight stored as a bitmask and the kept values. Indexing reads, checks and unpacks it."""

    ends: ClassVar[tuple[str, ...]] = (MASK, VALUES)

    @classmethod
    def of_header(cls, path, name, facts, parts, checksum) -> "StoredPackedWeight":
        mask, values = parts
        check_headers(facts["shape"], mask.shape, DTYPES[mask.dtype], values.shape, DTYPES[values.dtype])
        return cls(path, name, tuple(facts["shape"]), DTYPES[values.dtype], checksum, tuple(parts))

    @property
    def kept(self) -> int:
        return math.prod(self.parts[1].shape)

    def read_packed(self) -> PackedWeight:
        with self._named():
            mask, values = self._read_parts().values()
            check_mask(mask.numpy(), self.numel, len(values))
        return PackedWeight(PackedMask(mask, self.shape), values)

    def _read(self) -> torch.Tensor:
        with self._named():
            return unpack(*self._read_parts().values(), self.shape)


@dataclass(frozen=True)
class StoredCodedWeight(StoredWeight):
    """A sparse weight whose kept values are codes of a codebook.

    Args:
        bits (`int`): of each code.
    """

    bits: int = 0

    ends: ClassVar[tuple[str, ...]] = (MASK, CODES, SCALES, TABLE)

    @classmethod
    def of_header(cls, path, name, facts, parts, checksum) -> "StoredCodedWeight":
        headers = [(DTYPES[part.dtype], part.shape) for part in parts]
        shape, transposed = facts.get("shape"), facts.get("transposed", False)
        check_mask_header(shape, headers[0][1], headers[0][0])
        if type(transposed) is not bool:
            raise ValueError(f"its 'transposed' is {transposed!r}: expected true or false")
        dtype = _dtype(facts)
        check_coded_headers(_as_coded(shape, transposed), facts["bits"], facts.get("group"), dtype, headers)
        return cls(path, name, tuple(shape), dtype, checksum, tuple(parts), transposed, facts["bits"])

    @property
    def kept(self) -> int:
        """About how many elements are kept: no fewer than there are codes for."""
        return min(self.numel, self.parts[1].nbytes * 8 // self.bits)

    def read_packed(self) -> CodedWeight:
        return self._read_both()[0]

    def _read(self) -> torch.Tensor:
        dense = self._read_both()[1]
        return dense.mT.contiguous() if self.transposed else dense

    def _read_both(self) -> tuple[CodedWeight, torch.Tensor]:
        """Return the weight as it is stored, and unpacked, which checks it."""
        with self._named():
            shape = tuple(_as_coded(self.shape, self.transposed))
            coded = CodedWeight.of_parts(self._read_parts(), self.name, shape, self.bits, self.dtype)
            return coded, coded.unpack()

    def _seed(self) -> int:
        return coded_seed(self.name, self.get_dtype(), self.shape, self.bits, self.transposed)


@dataclass(frozen=True)
class StoredInt8Weight(StoredWeight):
    """A matrix of 8 bits without a mask: token embeddings or a head."""

    ends: ClassVar[tuple[str, ...]] = (LEVELS, SCALES)

    @classmethod
    def of_header(cls, path, name, facts, parts, checksum) -> "StoredInt8Weight":
        expected = {"mask": False, "bits": BITS, "group": GROUP}
        for key, value in expected.items():
            if type(facts.get(key)) is not type(value) or facts[key] != value:
                raise ValueError(f"its {key!r} is {facts.get(key)!r}: expected {value!r} of a matrix without a mask")
        shape, dtype = facts.get("shape"), _dtype(facts)
        check_int8_headers(shape, dtype, [(DTYPES[part.dtype], part.shape) for part in parts])
        return cls(path, name, tuple(shape), dtype, checksum, tuple(parts))

    @property
    def kept(self) -> int:
        return self.numel

    def read_packed(self) -> Int8Weight:
        with self._named():
            weight = Int8Weight.of_parts(self._read_parts(), self.name, self.dtype)
            weight.check()
        return weight

    def _read(self) -> torch.Tensor:
        return self.read_packed().unpack()

    def _seed(self) -> int:
        return int8_seed(self.name, self.get_dtype(), self.shape)


def coded_seed(name: str, dtype: str, shape: Sequence[int], bits: int, transposed: bool) -> int:
    """Return the CRC-32 of what the header says of a coded weight, see [`checksum_seed`]."""
    return checksum_seed(name, f"{dtype} {bits} bits{' transposed' if transposed else ''}", shape)


def int8_seed(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the CRC-32 of what the header says of a matrix of 8 bits, see [`checksum_seed`]."""
    return checksum_seed(name, f"{dtype} {BITS} bits without mask", shape)


def _dtype(facts: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that the metadata of a weight name; None if it is not known."""
    return DTYPES.get(facts["dtype"]) if isinstance(facts.get("dtype"), str) else None


def _as_coded(shape: Sequence[int], transposed: bool) -> list[int]:
    return [*shape[:-2], shape[-1], shape[-2]] if transposed else list(shape)
