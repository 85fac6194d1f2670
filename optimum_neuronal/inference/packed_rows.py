"""The layout that kernels compute with: every row's bitmask begins at a multiple of 64 bits, and its values at an offset."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..sparsity.bitmask import ALIGNMENT, mask_length, row_stride
from ..sparsity.packed import PackedMask, PackedWeight


DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the values
BLOCK = 2**22  # elements of a weight that are looked at together, so that temporaries stay small


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
        shape, bits = packed.shape, packed.mask.bits
        if len(shape) != 2:
            raise ValueError(f"PackedRows.of: a matrix was expected, but the weight has shape {list(shape)}")
        _check_values(packed.values)
        if bits.dtype != torch.uint8 or bits.shape != (mask_length(shape[0] * shape[1]),):
            raise ValueError(
                f"its bitmask has dtype {bits.dtype} and shape {list(bits.shape)}: expected torch.uint8 and "
                f"[{mask_length(shape[0] * shape[1])}] for a weight of shape {list(shape)}"
            )
        stride = row_stride(shape[1])
        aligned = bits.view(shape[0], stride) if shape[1] % ALIGNMENT == 0 else _align(packed.mask, stride)
        counts = _row_counts(aligned)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        if int(offsets[-1]) != len(packed.values):
            raise ValueError(f"its bitmask keeps {int(offsets[-1])} values, but {len(packed.values)} are stored")
        return cls(aligned, packed.values, offsets, (shape[0], shape[1]))

    def to_packed(self) -> PackedWeight:
        """The weight as files hold it, bit-equal; values are shared, and bits too if in % 64 == 0."""
        rows, columns = self.shape
        if columns % ALIGNMENT == 0:
            return PackedWeight(PackedMask(self.bits.view(-1), self.shape), self.values)
        kept = torch.empty(self.shape, dtype=torch.bool, device=self.bits.device)
        for block in row_blocks(rows, columns):
            kept[block] = unpack_bits(self.bits[block], columns)
        return PackedWeight(PackedMask.pack(kept), self.values)

    @property
    def nbytes(self) -> int:
        """Bytes that all three tensors take together."""
        return self.bits.nbytes + self.values.nbytes + self.offsets.nbytes

    def check(self) -> None:
        """Raises `ValueError` if bits, values and offsets disagree: kernels believe what they say."""
        rows, columns = self.shape
        _check_values(self.values)
        expected = {"bits": (torch.uint8, (rows, row_stride(columns))), "offsets": (torch.int64, (rows + 1,))}
        for name, (dtype, shape) in expected.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(
                    f"its {name} have dtype {tensor.dtype} and shape {list(tensor.shape)}: expected {dtype} and "
                    f"{list(shape)} for a weight of shape {list(self.shape)}"
                )
            if tensor.device != self.values.device:
                raise ValueError(f"its {name} lie on {tensor.device}, but its values on {self.values.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"its {name} are not contiguous")
        if rows and _has_bits_behind(self.bits, columns):
            raise ValueError(f"its bitmask has bits set behind a row's {columns} elements")
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first != 0 or last != len(self.values):
            raise ValueError(f"its offsets go from {first} to {last}: expected 0 to {len(self.values)}, its values")
        wrong = torch.nonzero(self.offsets.diff() != _row_counts(self.bits))
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"its bitmask keeps {int(_row_counts(self.bits[row : row + 1]))} values of row {row}, but by its "
                f"offsets there are {int(self.offsets[row + 1] - self.offsets[row])}"
            )


def row_blocks(rows: int, columns: int, elements: int = BLOCK) -> Iterator[slice]:
    """Slices of rows that hold about `elements` elements each; all but the last a multiple of 8 rows."""
    step = max(8, elements // max(1, columns) // 8 * 8)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def unpack_bits(bits: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows of bits, uint8, shape (rows, stride), as booleans of shape (rows, columns), True where kept."""
    return PackedMask(bits.reshape(-1), (len(bits), 8 * bits.shape[1])).unpack()[:, :columns]


def _align(mask: PackedMask, stride: int) -> torch.Tensor:
    """The bits of rows that begin anywhere, as rows of `stride` bytes."""
    rows, columns = mask.shape
    aligned = torch.zeros(rows, stride, dtype=torch.uint8, device=mask.bits.device)
    for block in row_blocks(rows, columns):  # multiples of 8 rows begin with a byte
        part = mask.bits[block.start * columns // 8 : mask_length(block.stop * columns)]
        kept = PackedMask(part, (block.stop - block.start, columns)).unpack()
        padded = torch.nn.functional.pad(kept, (0, 8 * stride - columns))
        aligned[block] = PackedMask.pack(padded).bits.view(-1, stride)
    return aligned


def _row_counts(bits: torch.Tensor) -> torch.Tensor:
    """How many bits are set in every row: int64, shape (rows,)."""
    table = torch.arange(256, device=bits.device)
    table = sum((table >> position) & 1 for position in range(8)).to(torch.uint8)
    counts = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
    for block in row_blocks(len(bits), bits.shape[1]):
        part = bits[block]
        counts[block] = table.index_select(0, part.reshape(-1).int()).view(part.shape).sum(dim=1)
    return counts


def _has_bits_behind(bits: torch.Tensor, columns: int) -> bool:
    whole, rest = divmod(columns, 8)
    if rest and bool((bits[:, whole] >> rest).any()):
        return True
    return bool(bits[:, whole + bool(rest) :].any())


def _check_values(values: torch.Tensor) -> None:
    if values.dtype not in DTYPES:
        expected = ", ".join(map(str, DTYPES))
        raise ValueError(f"its values have dtype {values.dtype}: there are kernels for {expected}")
    if values.ndim != 1 or not values.is_contiguous():
        raise ValueError(f"its values have shape {list(values.shape)}: expected one dimension, contiguous")
