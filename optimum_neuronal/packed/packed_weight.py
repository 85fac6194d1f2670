"""A sparse weight as packed files and kernels hold it: a bitmask of the kept elements, and their values row by row.

An element with any bit set is kept, including -0.0 and NaN, so unpacking is exact bit for bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..model.change import PackedMask, row_stride
from ..native.library import find_kernel
from .sparse_matrix import BLOCK, SCRATCH_ROWS, SparseMatrix, row_blocks


FORMAT = "sparse"  # the name of this format in files
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that kernels compute with
PREFIX = ".packed_"  # between a module's path and a tensor's name, in files
STORED = "packed_"  # precedes the names of tensors in files and modules
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a float -> its bits as a number
# Rows of x up to which a fused kernel is faster than unpacking and torch.mm, by benchmarks/packed_kernels.py.
MAX_FUSED_ROWS = 8
MAX_FUSED_ROWS_BY_KERNEL = {"avx512_bf16": 16}


@dataclass(frozen=True)
class PackedWeight(SparseMatrix):
    """A sparse weight of shape (..., in). All dimensions but the last count rows.

    Attributes:
        mask (`torch.Tensor`):
            uint8, shape (rows, 8 * ceil(in / 64)): element j of a row is bit j % 8, from the lowest, of byte j // 8, 1 where
            kept and 0 after the end of the row.
        values (`torch.Tensor`): the kept values, row by row, shape (kept,), of the weight's dtype.
        offsets (`torch.Tensor`): int64, shape (rows + 1,), where in `values` each row starts. Not stored in files.
        shape (`tuple[int, ...]`): of the dense weight.
    """

    mask: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def pack(cls, weight: torch.Tensor) -> "PackedWeight":
        """Pack a weight of at least two dimensions and any floating dtype, on its device."""
        weight = weight.detach()
        columns, stride = weight.shape[-1], row_stride(weight.shape[-1])
        matrix = weight.reshape(math.prod(weight.shape[:-1]), columns).contiguous()
        numbers = matrix.view(INTEGERS[weight.element_size()])
        mask = torch.empty(len(matrix), stride, dtype=torch.uint8, device=weight.device)
        values = []
        for block in row_blocks(len(matrix), columns):
            part = numbers[block]
            kept = part != 0
            padded = torch.nn.functional.pad(kept, (0, 8 * stride - columns))
            mask[block] = PackedMask.pack(padded).bits.view(len(part), stride)
            values.append(_kept_numbers(part, kept))
        joined = torch.cat(values) if values else numbers.new_empty(0)
        return cls.from_parts(mask, joined.view(weight.dtype), weight.shape)

    @classmethod
    def from_parts(cls, mask: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> "PackedWeight":
        """Return the weight of a mask and values, whose dtypes and shapes must be right."""
        offsets = torch.nn.functional.pad(_count_by_row(mask).cumsum(0), (1, 0))
        return cls(mask, values, offsets, tuple(shape))

    @classmethod
    def from_stored(
        cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> "PackedWeight":
        """Return the weight of what [`stored`] returns. Raise `ValueError` unless everything that kernels rely on holds.

        On the meta device, only dtypes and shapes are checked.
        """
        check_shape(shape, dtype)
        for name in ("mask", "values"):
            if tensors.get(STORED + name) is None:
                raise ValueError(f"it has no {name}")
        mask, values = tensors[STORED + "mask"], tensors[STORED + "values"]
        size = math.prod(shape[:-1]), row_stride(shape[-1])
        _check_tensor("values", values, dtype, values.numel(), device=values.device)
        _check_tensor("mask", mask, torch.uint8, *size, device=values.device)
        weight = cls.from_parts(mask, values, shape)
        if not mask.is_meta:
            weight._check_bits()
        return weight

    def stored(self) -> dict[str, torch.Tensor]:
        """Return what files and modules hold, by the names there."""
        return {STORED + "mask": self.mask, STORED + "values": self.values}

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.mask, self.values, self.offsets

    def _check_bits(self) -> None:
        """Raise `ValueError` unless the mask keeps as many elements as there are values, and none past a row's end."""
        columns = self.shape[-1]
        whole, rest = divmod(columns, 8)
        if (rest and (self.mask[:, whole] >> rest).any()) or self.mask[:, whole + bool(rest) :].any():
            raise ValueError(f"its bitmask has bits set past a row's {columns} elements")
        if (kept := int(self.offsets[-1])) != len(self.values):
            raise ValueError(f"its bitmask keeps {kept} values, but {len(self.values)} are stored")

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        kernel = find_kernel() if x.device.type == "cpu" else None
        most = 0 if kernel is None else MAX_FUSED_ROWS_BY_KERNEL.get(kernel.name, MAX_FUSED_ROWS)
        if kernel is not None and len(x) <= most:
            return kernel.multiply(x, *self.tensors(), bias)
        # Without kernels, few rows at a time, so that they stay in the cache until they are multiplied.
        together = SCRATCH_ROWS if kernel else BLOCK // max(1, x.shape[1])
        return self.multiply_by_blocks(x, bias, together)

    def fill(self, rows: slice, dense: torch.Tensor) -> None:
        mask, offsets = self.mask[rows], self.offsets[rows.start : rows.stop + 1]
        kernel = find_kernel() if dense.device.type == "cpu" and self.dtype in DTYPES else None
        if kernel is not None:
            kernel.to_dense(mask, self.values, offsets, dense)
            return
        integers = INTEGERS[dense.element_size()]  # copied as integers, so that no bit of a NaN changes
        source = self.values.view(integers)
        for block in row_blocks(*dense.shape):
            kept = unpack_bits(mask[block], dense.shape[1])
            dense[block].view(integers).zero_().masked_scatter_(kept, source[int(offsets[block.start]) :])

    def window(self, first: int, last: int) -> "PackedWeight":
        """Return the rows from `first` up to `last` to compute with. They share all values, so no offset is read."""
        mask, offsets = self.mask[first:last], self.offsets[first : last + 1]
        return replace(self, mask=mask, offsets=offsets, shape=(last - first, self.shape[-1]))

    def to(self, dtype: torch.dtype | None) -> "PackedWeight":
        """Return this weight with another dtype; None: its own."""
        return replace(self, values=self.values.to(dtype=dtype))


def _check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int, device: torch.device) -> None:
    """Raise `ValueError` unless a part of a weight has this dtype and shape, is contiguous and on this device."""
    came = tensor.dtype, list(tensor.shape), tensor.device
    if came != (dtype, list(shape), device):
        raise ValueError(
            f"its {name} have dtype {came[0]} and shape {came[1]} on {came[2]}: expected {dtype} and {list(shape)} on {device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"its {name} are not contiguous")


def check_shape(shape: Any, dtype: Any) -> None:
    """Raise `ValueError` unless weights of this shape and dtype, as a file has them, can be computed with."""
    sizes = shape if isinstance(shape, (list, tuple)) else ()
    if not 2 <= len(sizes) <= 8 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"its shape is {shape!r}: expected a list of 2 to 8 whole numbers above 0")
    if dtype not in DTYPES:
        raise ValueError(f"its dtype is {dtype}: expected one of {', '.join(map(str, DTYPES))}")


def swapped(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Return a shape with its last two sizes swapped, if `transposed`."""
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)


def count_kept(weight: torch.Tensor) -> int:
    """Return how many elements have any bit set."""
    return int(torch.count_nonzero(weight.detach().view(INTEGERS[weight.element_size()])))


def unpack_bits(mask: torch.Tensor, columns: int) -> torch.Tensor:
    """Return rows of bits, uint8, shape (rows, stride), as booleans of shape (rows, columns), True where kept."""
    return PackedMask(mask.reshape(-1), (len(mask), 8 * mask.shape[1])).unpack()[:, :columns]


def _kept_numbers(numbers: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    if numbers.device.type == "cpu":  # numpy takes a third of torch's time
        return torch.from_numpy(numbers.numpy().reshape(-1)[np.flatnonzero(kept.numpy())])
    return numbers[kept]


def _count_by_row(mask: torch.Tensor) -> torch.Tensor:
    """Return how many bits are set in every row of whole words: int64, shape (rows,)."""
    if mask.device.type == "cpu":
        counts = np.bitwise_count(mask.contiguous().numpy().view(np.uint64))
        return torch.from_numpy(counts.sum(1, dtype=np.int64))
    counts = torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
    for block in row_blocks(len(mask), 8 * mask.shape[1]):
        counts[block] = unpack_bits(mask[block], 8 * mask.shape[1]).sum(dim=1)
    return counts
