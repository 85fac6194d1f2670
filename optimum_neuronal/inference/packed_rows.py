"""The layout that kernels compute with: every row's bitmask begins at a multiple of 64 bits, and its values at an offset."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..formats.bitmask import INTEGERS, row_stride
from ..formats.packed import PackedWeight
from .bit_rows import align, check_offsets, check_tensors, close_up, row_counts
from .ops import packed_linear, unpack_rows


DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the values


@dataclass(frozen=True)
class PackedRows:
    """A sparse matrix of shape (out, in) as the kernels read it; all its tensors lie on one device.

    Args:
        bits (`Tensor`): uint8, shape (out, stride), stride = 8 * ceil(in / 64). Element j of a row is bit j % 8, from
            the lowest, of byte j // 8; 1 where kept, 0 behind `in`.
        values (`Tensor`): the kept values, row by row, shape (kept,); bfloat16, float16 or float32.
        offsets (`Tensor`): int64, shape (out + 1,), rising from 0 to kept: where in `values` every row begins.
        shape (`tuple[int, int]`): (out, in).
    """

    kind: ClassVar[str] = "packed"  # name among the layouts, see `layouts`
    names: ClassVar[tuple[str, ...]] = ("bits", "values", "offsets")  # of its tensors, in this order

    bits: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, packed: PackedWeight) -> "PackedRows":
        """Lays a packed matrix out for the kernels, on its device. Values are shared, and bits too if in % 64 == 0.

        Raises:
            `ValueError`: the weight is no matrix, or of a dtype without kernels, or its mask and values disagree.
        """
        bits = align(packed.mask, "PackedRows.of")
        _check_values(packed.values)
        offsets = torch.nn.functional.pad(row_counts(bits).cumsum(0), (1, 0))
        if int(offsets[-1]) != len(packed.values):
            raise ValueError(f"its bitmask keeps {int(offsets[-1])} values, but {len(packed.values)} are stored")
        return cls(bits, packed.values, offsets, tuple(packed.shape))

    def to_packed(self) -> PackedWeight | None:
        """The weight as files hold it, bit-equal; values are shared, and bits too if in % 64 == 0.

        None if some values are zero, converted to a dtype in which they are no values any more.
        """
        if bool((self.values.view(INTEGERS[self.values.element_size()]) == 0).any()):
            return None
        return PackedWeight(close_up(self.bits, self.shape), self.values)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """On which all tensors lie."""
        return self.values.device

    @property
    def kept(self) -> int:
        """How many elements are kept."""
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes that all three tensors take together."""
        return self.bits.nbytes + self.values.nbytes + self.offsets.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ W.T + bias`, see [`packed_linear`]."""
        return packed_linear(x, self.bits, self.values, self.offsets, bias)

    def unpack(self) -> torch.Tensor:
        """The dense matrix, bit-equal."""
        return unpack_rows(self.bits, self.values, self.offsets, self.shape[1])

    def converted(self, device: torch.device | None, dtype: torch.dtype | None) -> "PackedRows":
        """These rows on another device, or with values of another dtype. None: as they are."""
        values = self.values.to(device=device, dtype=dtype)
        return PackedRows(self.bits.to(device=device), values, self.offsets.to(device=device), self.shape)

    def window(self, first: int, last: int) -> "PackedRows":
        """The rows from `first` on, up to `last`, beside all values: for computing alone, without a look at offsets."""
        offsets = self.offsets[first : last + 1]
        return PackedRows(self.bits[first:last], self.values, offsets, (last - first, self.shape[1]))

    def part(self, first: int, last: int) -> "PackedRows":
        """The rows from `first` on, up to `last`; bits and values are shared."""
        offsets = self.offsets[first : last + 1]
        start, stop = int(offsets[0]), int(offsets[-1])
        return PackedRows(
            self.bits[first:last], self.values[start:stop], offsets - start, (last - first, self.shape[1])
        )

    def joins(self, other: "PackedRows") -> bool:
        """Whether rows of another weight can follow these."""
        return (self.shape[1], self.dtype, self.device) == (other.shape[1], other.dtype, other.device)

    @classmethod
    def joined(cls, parts: Sequence["PackedRows"]) -> "PackedRows":
        """The rows of all parts, one after the other; a single part is shared, several are copied."""
        if len(parts) == 1:
            return parts[0]
        bits = torch.cat([rows.bits for rows in parts])
        values = torch.cat([rows.values for rows in parts])
        offsets = joined_offsets([rows.offsets for rows in parts], [len(rows.values) for rows in parts])
        return cls(bits, values, offsets, (len(bits), parts[0].shape[1]))

    def check(self) -> None:
        """Raises `ValueError` if bits, values and offsets disagree: kernels believe what they say."""
        rows, columns = self.shape
        _check_values(self.values)
        tensors = {"values": self.values, "bits": self.bits, "offsets": self.offsets}
        expected = {"bits": (torch.uint8, (rows, row_stride(columns))), "offsets": (torch.int64, (rows + 1,))}
        check_tensors(tensors, expected, self.shape)
        check_offsets(self.bits, columns, self.offsets, row_counts(self.bits), len(self.values), "values")


def joined_offsets(offsets: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Offsets of several weights' rows, one after the other, each of which begins at 0 and ends at its count."""
    found, start = [offsets[0][:1]], 0
    for part, count in zip(offsets, counts):
        found.append(part[1:] + start)
        start += count
    return torch.cat(found)


def _check_values(values: torch.Tensor) -> None:
    if values.dtype not in DTYPES:
        expected = ", ".join(map(str, DTYPES))
        raise ValueError(f"its values have dtype {values.dtype}: there are kernels for {expected}")
    if values.ndim != 1 or not values.is_contiguous():
        raise ValueError(f"its values have shape {list(values.shape)}: expected one dimension, contiguous")
