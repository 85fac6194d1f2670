"""The layout that kernels for values of few bits compute with: rows of bits, of codes, and of scales."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..formats.bitmask import row_stride
from ..formats.codebooks import check_table
from ..formats.coded import GROUP, CodedWeight
from ..formats.scale_grid import narrow, widen
from ..native.library import BITS_BY_LEVELS, bits_of_codes
from .bit_rows import align, check_offsets, check_tensors, close_up, row_counts, word_counts
from .coded_ops import coded_linear, scale_dtype, unpack_coded
from .packed_rows import joined_offsets


ACTIVATIONS = ("int8", "bf16")  # how inputs are multiplied: rounded to 8 bits by blocks of 128, or as they are


@dataclass(frozen=True)
class CodedRows:
    """A sparse matrix of shape (out, in) with values of few bits, as the kernels read it; all tensors lie on one device.

    Args:
        bits (`Tensor`): uint8, shape (out, stride), as of [`PackedRows`].
        codes (`Tensor`): uint8, shape (bytes,): of every row, for every 64 columns, the codes of the kept elements as a
            bit stream that fills whole bytes.
        offsets (`Tensor`): int64, shape (out + 1,), rising from 0 to the number of bytes: where every row's codes begin.
        scales (`Tensor`): shape (out, ceil(in / 128)): uint8, codes of short scales ([`scale_grid`]); or int16, the bits
            of bfloat16 numbers, which nothing shall convert to another dtype.
        table (`Tensor`): int8, shape (2**bits,): the levels that codes stand for, or (0,) of 8 bits.
        like (`Tensor`): shape (0,), of the weight's dtype, in which results are.
        shape (`tuple[int, int]`): (out, in).
        activations (`str`): `"int8"` or `"bf16"`: how inputs are multiplied.
        rounded (`torch.dtype`, *optional*): to which elements are rounded before they become the weight's dtype: that of
            the file, so that each reader finds the same numbers in each dtype. None: the weight's.
    """

    names: ClassVar[tuple[str, ...]] = ("bits", "codes", "offsets", "scales", "table", "like")

    bits: torch.Tensor
    codes: torch.Tensor
    offsets: torch.Tensor
    scales: torch.Tensor
    table: torch.Tensor
    like: torch.Tensor
    shape: tuple[int, int]
    activations: str = "int8"
    rounded: torch.dtype | None = None

    @classmethod
    def of(cls, coded: CodedWeight, activations: str = "int8") -> "CodedRows":
        """Lays a coded matrix out for the kernels, on its device. Codes are shared, and bits too if in % 64 == 0.

        Raises:
            `ValueError`: the weight is no matrix, or its mask, codes and scales disagree.
        """
        bits = align(coded.mask, "CodedRows.of")
        counts = _row_bytes(bits, coded.bits)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        like = torch.empty(0, dtype=coded.dtype, device=coded.codes.device)
        short = narrow(coded.scales)
        scales = coded.scales.contiguous().view(torch.int16) if short is None else short
        rows = cls(bits, coded.codes, offsets, scales, coded.table, like, tuple(coded.shape), activations, coded.dtype)
        rows.check()
        return rows

    def to_packed(self) -> CodedWeight:
        """The weight as files hold it; codes are shared, and bits too if in % 64 == 0."""
        mask = close_up(self.bits, self.shape)
        return CodedWeight(
            mask, self.codes, widen(self.scales), self.table, self.value_bits, self.rounded or self.dtype
        )

    @property
    def kind(self) -> str:
        """Name among the layouts, see `layouts`."""
        return self.activations

    @property
    def value_bits(self) -> int:
        """Of a code: 2, 3, 4 or 8."""
        return bits_of_codes(self.table)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """On which all tensors lie."""
        return self.like.device

    @property
    def kept(self) -> int:
        """How many elements are kept."""
        return int(row_counts(self.bits).sum())

    @property
    def nbytes(self) -> int:
        """Bytes that all tensors take together."""
        return sum(getattr(self, name).nbytes for name in self.names)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ W.T + bias`, see [`coded_linear`]."""
        int8 = self.activations == "int8"
        return coded_linear(x, self.bits, self.codes, self.offsets, self.scales, self.table, bias, int8)

    def unpack(self) -> torch.Tensor:
        """The dense matrix: scales times levels, rounded, of the weight's dtype."""
        dtype = self.rounded or self.dtype
        dense = unpack_coded(self.bits, self.codes, self.offsets, self.scales, self.table, self.shape[1], dtype)
        return dense.to(self.dtype)

    def converted(self, device: torch.device | None, dtype: torch.dtype | None) -> "CodedRows":
        """These rows on another device, or of another dtype, in which scales and levels stay as they are."""
        tensors = {name: getattr(self, name).to(device=device) for name in self.names}
        return replace(self, **tensors | {"like": tensors["like"].to(dtype)})

    def window(self, first: int, last: int) -> "CodedRows":
        """The rows from `first` on, up to `last`, beside all codes: for computing alone, without a look at offsets."""
        return replace(
            self,
            bits=self.bits[first:last],
            offsets=self.offsets[first : last + 1],
            scales=self.scales[first:last],
            shape=(last - first, self.shape[1]),
        )

    def part(self, first: int, last: int) -> "CodedRows":
        """The rows from `first` on, up to `last`; bits and codes are shared."""
        rows = self.window(first, last)
        start, stop = int(rows.offsets[0]), int(rows.offsets[-1])
        return replace(rows, codes=self.codes[start:stop], offsets=rows.offsets - start)

    def joins(self, other: "CodedRows") -> bool:
        """Whether rows of another weight can follow these: they have to have the same table."""
        mine = (self.shape[1], self.dtype, self.rounded, self.device, self.activations)
        same = mine == (other.shape[1], other.dtype, other.rounded, other.device, other.activations)
        return same and torch.equal(self.table, other.table)

    @classmethod
    def joined(cls, parts: Sequence["CodedRows"]) -> "CodedRows":
        """The rows of all parts, one after the other; a single part is shared, several are copied."""
        if len(parts) == 1:
            return parts[0]
        bits, codes = (torch.cat([getattr(rows, name) for rows in parts]) for name in ("bits", "codes"))
        scales = [rows.scales for rows in parts]
        if len({part.dtype for part in scales}) > 1:
            scales = [widen(part).view(torch.int16) for part in scales]
        offsets = joined_offsets([rows.offsets for rows in parts], [len(rows.codes) for rows in parts])
        return replace(
            parts[0],
            bits=bits,
            codes=codes,
            scales=torch.cat(scales),
            offsets=offsets,
            shape=(len(bits), parts[0].shape[1]),
        )

    def check(self) -> None:
        """Raises `ValueError` if the tensors disagree: kernels believe what they say."""
        rows, columns = self.shape
        if len(self.table) not in BITS_BY_LEVELS:
            raise ValueError(f"its table has {len(self.table)} levels: expected {', '.join(map(str, BITS_BY_LEVELS))}")
        expected = {
            "bits": (torch.uint8, (rows, row_stride(columns))),
            "offsets": (torch.int64, (rows + 1,)),
            "scales": (scale_dtype(self.scales), (rows, -(-columns // GROUP))),
            "codes": (torch.uint8, (self.codes.numel(),)),
            "table": (torch.int8, (len(self.table),)),
        }
        check_tensors({name: getattr(self, name) for name in ("codes", *expected)}, expected, self.shape)
        check_table(self.table.tolist(), self.value_bits)
        counts = _row_bytes(self.bits, self.value_bits)
        check_offsets(self.bits, columns, self.offsets, counts, len(self.codes), "bytes of codes")
        if not bool(widen(self.scales).isfinite().all()):
            raise ValueError("its scales are not all finite")


def check_activations(activations: str) -> None:
    """Raises `ValueError` for inputs that no kernel takes."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations={activations!r}: expected one of {', '.join(map(repr, ACTIVATIONS))}")


def _row_bytes(bits: torch.Tensor, value_bits: int) -> torch.Tensor:
    """How many bytes the codes of every row take: int64, shape (rows,)."""
    return ((word_counts(bits).to(torch.int16) * value_bits + 7) >> 3).sum(1, dtype=torch.int64)
