"""Sparse weights: a bitmask of the kept elements, and their values row by row.

An element with any bit set is kept, -0.0 and NaN too, so that a weight comes back bit-equal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from ...model.change import PackedMask
from ...native.library import find_kernel, warn_without_kernel
from .packed_matrix import (
    BLOCK,
    DTYPES,
    SCRATCH_ROWS,
    Header,
    PackedMatrix,
    multiply_by_blocks,
    register_format,
    row_blocks,
)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a float -> its bits as a number
ALIGNMENT = 64  # elements whose bits are a word
# Rows of x up to which a fused kernel is faster than unpacking and torch.mm, by benchmarks/packed_kernels.py.
MAX_FUSED_ROWS = 8
MAX_FUSED_ROWS_BY_KERNEL = {"avx512_bf16": 16}


@register_format("sparse")
@dataclass(frozen=True)
class SparseWeight(PackedMatrix):
    """A sparse weight of shape (..., in).

    `mask`, uint8, shape (rows, 8 * ceil(in / 64)): element j of a row is bit j % 8, from the lowest, of byte j // 8, 1 where
    kept and 0 after the end of the row. `offsets` rise from 0 to kept: where in `values` each row starts.
    """

    names: ClassVar[tuple[str, ...]] = ("mask", "values", "offsets")
    derived: ClassVar[tuple[str, ...]] = ("offsets",)

    mask: torch.Tensor
    values: torch.Tensor  # the kept values, row by row, shape (kept,), of the weight's dtype
    offsets: torch.Tensor  # int64, shape (rows + 1,)
    shape: tuple[int, ...]

    @classmethod
    def pack(cls, weight: torch.Tensor) -> "SparseWeight":
        """Pack a weight of at least two dimensions and any floating dtype, on its device."""
        weight = weight.detach()
        columns, stride = weight.shape[-1], row_stride(weight.shape[-1])
        matrix = weight.reshape(math.prod(weight.shape[:-1]), columns).contiguous()
        numbers = matrix.view(INTEGERS[weight.element_size()])
        bits = torch.empty(len(matrix), stride, dtype=torch.uint8, device=weight.device)
        values = []
        for block in row_blocks(len(matrix), columns):
            part = numbers[block]
            kept = part != 0
            padded = torch.nn.functional.pad(kept, (0, 8 * stride - columns))
            bits[block] = PackedMask.pack(padded).bits.view(len(part), stride)
            values.append(_taken(part, kept))
        found = torch.cat(values) if values else numbers.new_empty(0)
        return cls.of_tensors({"mask": bits, "values": found.view(weight.dtype)}, weight.shape, weight.dtype)

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> "SparseWeight":
        bits, offsets = tensors["mask"], tensors.get("offsets")
        if offsets is None:
            offsets = torch.nn.functional.pad(_row_counts(bits).cumsum(0), (1, 0))
        return cls(bits, tensors["values"], offsets, tuple(shape))

    @classmethod
    def expected_headers(
        cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> dict[str, Header]:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return {
            "mask": (torch.uint8, (rows, row_stride(columns))),
            "values": (dtype, (tensors["values"].numel(),)),
            "offsets": (torch.int64, (rows + 1,)),
        }

    def check_values(self) -> None:
        rows, columns = self.row_count, self.shape[-1]
        whole, rest = divmod(columns, 8)
        if rows and (rest and (self.mask[:, whole] >> rest).any() or self.mask[:, whole + bool(rest) :].any()):
            raise ValueError(f"its bitmask has bits set behind a row's {columns} elements")
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if (first, last) != (0, len(self.values)):
            raise ValueError(f"its bitmask keeps {last - first} values, but {len(self.values)} are stored")
        wrong = torch.nonzero(self.offsets.diff() != _row_counts(self.mask))
        if len(wrong):
            raise ValueError(
                f"its offsets don't fit the number of values that its bitmask keeps in row {int(wrong[0])}"
            )

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.values.dtype

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Sums are taken in float32, in a fixed order."""
        kernel = find_kernel() if x.device.type == "cpu" else None
        most = 0 if kernel is None else MAX_FUSED_ROWS_BY_KERNEL.get(kernel.name, MAX_FUSED_ROWS)
        if kernel is None or len(x) > most:
            if kernel is None and x.device.type == "cpu":
                warn_without_kernel()
            # Without kernels, few rows at a time, so that they stay in the cache until they are multiplied.
            together = SCRATCH_ROWS if kernel else BLOCK // max(1, x.shape[1])
            return multiply_by_blocks(x, self.row_count, bias, self.fill, together)
        return kernel.linear(x, self.mask, self.values, self.offsets, bias)

    def fill(self, rows: slice, dense: torch.Tensor) -> None:
        mask, offsets = self.mask[rows], self.offsets[rows.start : rows.stop + 1]
        kernel = find_kernel() if dense.device.type == "cpu" and self.dtype in DTYPES else None
        if kernel is not None:
            kernel.unpack(mask, self.values, offsets, dense)
            return
        integers = INTEGERS[dense.element_size()]  # copied as integers, so that no bit of a NaN changes
        source = self.values.view(integers)
        for block in row_blocks(*dense.shape):
            target, kept = dense[block].view(integers), unpack_bits(mask[block], dense.shape[1])
            if not len(source):
                target.zero_()
            elif dense.device.type == "cpu":
                target.zero_().masked_scatter_(kept, source[int(offsets[block.start]) :])
            else:  # reads no number from the device: a slice of `source` would, and wait until the device has finished
                places = kept.cumsum(1).add_(offsets[block, None] - 1).clamp_(min=0, max=len(source) - 1)
                target.copy_(source[places].masked_fill_(~kept, 0))

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> "SparseWeight":
        values = self.values.to(device=device, dtype=dtype)
        return replace(self, mask=self.mask.to(device=device), values=values, offsets=self.offsets.to(device=device))

    def window(self, first: int, last: int) -> "SparseWeight":
        """Return some rows beside all values. Reading offsets would have to wait for the device."""
        mask, offsets = self.mask[first:last], self.offsets[first : last + 1]
        return replace(self, mask=mask, offsets=offsets, shape=(last - first, self.shape[-1]))

    def rows(self, first: int, last: int) -> "SparseWeight":
        part = self.window(first, last)
        start, stop = int(part.offsets[0]), int(part.offsets[-1])
        return replace(part, values=self.values[start:stop], offsets=part.offsets - start)

    def joins(self, other: "SparseWeight") -> bool:
        return (self.shape[-1], self.dtype, self.device) == (other.shape[-1], other.dtype, other.device)

    @classmethod
    def joined(cls, parts: Sequence["SparseWeight"]) -> "SparseWeight":
        bits, values = torch.cat([part.mask for part in parts]), torch.cat([part.values for part in parts])
        return cls.of_tensors({"mask": bits, "values": values}, (len(bits), parts[0].shape[-1]), values.dtype)


def sparse_bytes(shape: Sequence[int], kept: int, itemsize: int) -> int:
    """Return the bytes that a sparse weight takes in a file: a bit for each element, rows rounded up to words, and values."""
    return math.prod(shape[:-1]) * row_stride(shape[-1]) + kept * itemsize


def row_stride(columns: int) -> int:
    """Return the bytes of the bits of a row of so many elements, rounded up to whole words."""
    return 8 * -(-columns // ALIGNMENT)


def count_kept(weight: torch.Tensor) -> int:
    """Return how many elements have any bit set."""
    return int(torch.count_nonzero(weight.detach().view(INTEGERS[weight.element_size()])))


def unpack_bits(bits: torch.Tensor, columns: int) -> torch.Tensor:
    """Return rows of bits, uint8, shape (rows, stride), as booleans of shape (rows, columns), True where kept."""
    return PackedMask(bits.reshape(-1), (len(bits), 8 * bits.shape[1])).unpack()[:, :columns]


def _taken(numbers: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    if numbers.device.type == "cpu":  # numpy takes a third of torch's time
        return torch.from_numpy(numbers.numpy().reshape(-1)[np.flatnonzero(kept.numpy())])
    return numbers[kept]


def _row_counts(bits: torch.Tensor) -> torch.Tensor:
    """Return how many bits are set in every row of whole words: int64, shape (rows,)."""
    if bits.device.type == "cpu":
        counts = np.bitwise_count(bits.contiguous().numpy().view(np.uint64))
        return torch.from_numpy(counts.sum(1, dtype=np.int64))
    counts = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
    for block in row_blocks(len(bits), 8 * bits.shape[1]):
        counts[block] = unpack_bits(bits[block], 8 * bits.shape[1]).sum(dim=1)
    return counts
