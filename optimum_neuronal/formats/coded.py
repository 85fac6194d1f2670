"""Sparse weights whose kept values are few-bit codes: of every row and 128 columns a scale, of a weight a table of levels.

A weight that was rounded so stays an ordinary one in memory; [`CodedWeight.exact`] finds its codes again, bit for bit.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..sparsity.masks import Change
from .bitmask import MASK, check_mask_end
from .code_checks import CODED_DTYPES, GROUP, check_scales
from .code_scales import find_scales, fit_scales
from .code_stream import BLOCK, pack_codes, unpack_codes
from .codebooks import TABLES, check_bits, check_table, magnitudes, nearest_magnitude
from .packed import PackedMask
from .scale_grid import ScaleGrid, narrow, scale_range, widen


CODES, SCALES, TABLE = ".packed_codes", ".packed_scales", ".packed_table"  # what follows a weight's name in a file


@dataclass(frozen=True)
class CodedWeight(Change):
    """A sparse weight with values of few bits; as a change, it takes the place of another.

    Each kept element is `float32(scale) * float32(level)`, rounded to `dtype`. Of a weight of more than two dimensions,
    rows are the product of all but the last. All tensors lie on one device.

    Args:
        mask ([`PackedMask`]): which elements are kept: those that are not zero; -0.0 counts as zero.
        codes (`Tensor`): uint8, shape (bytes,): the bit stream of [`code_stream`].
        scales (`Tensor`): bfloat16, shape (rows, ceil(columns / 128)): positive where a group keeps anything, else 0.
        table (`Tensor`): int8, shape (2**bits,): the levels that codes stand for; shape (0,) of 8 bits, whose codes are
            the levels themselves.
        bits (`int`): of each code: 8, 4, 3 or 2.
        dtype (`torch.dtype`): of the weight: float16, bfloat16 or float32.
    """

    mask: PackedMask
    codes: torch.Tensor
    scales: torch.Tensor
    table: torch.Tensor
    bits: int
    dtype: torch.dtype

    @classmethod
    def exact(cls, weight: torch.Tensor, bits: int) -> "CodedWeight | None":
        """The codes of a weight whose kept values can be coded without a change, as [`unpack`] gives them; else `None`.

        Raises:
            `ValueError`: there are no codes of so many bits, or the weight is of another dtype, or not finite.
        """
        rows = _rows(weight, bits)
        for table in TABLES[bits]:
            found = []
            for groups in _grouped(rows):
                found.append(find_scales(groups.abs(), magnitudes(table), weight.dtype))
                if found[-1] is None:
                    break
            if not found or found[-1] is not None:
                return cls._of(weight, _joined(found, rows), table, bits)
        return None

    @classmethod
    def nearest(cls, weight: torch.Tensor, bits: int, table: Sequence[int] | None = None) -> "CodedWeight":
        """Rounds the kept values of a weight to the nearest levels; the mask stays as it is.

        The scale of each group is the one with the least squared error of a grid: the largest values, which no scale may
        hold together with the others, are clipped where that errs less.

        Args:
            weight (`Tensor`): of at least two dimensions, finite.
            bits (`int`): 8, 4, 3 or 2.
            table (`Sequence[int]`, *optional*): levels; that of [`TABLES`] with the least squared error, if none is given.

        Raises:
            `ValueError`: there are no codes of so many bits, or no such table, or the weight is of another dtype, or not finite.
        """
        rows = _rows(weight, bits)
        largest = torch.cat([rows.new_zeros(0, dtype=torch.float32), *(g.abs().amax(1) for g in _grouped(rows))])
        tables = TABLES[bits] if table is None else (tuple(int(level) for level in table),)
        least, chosen = math.inf, None
        for levels in tables:
            check_table(levels, bits)
            sizes = magnitudes(levels)
            grid = ScaleGrid.of(largest, sizes, weight.dtype)
            fitted, error = [], 0.0
            for groups in _grouped(rows):
                scales, errors = fit_scales(groups.abs(), sizes, grid)
                fitted.append(scales)
                error += float(errors.double().sum())
                if error >= least:  # the rest of the weight cannot make it less
                    break
            if chosen is None or error < least:
                least, chosen = error, (_joined(fitted, rows), levels)
        return cls._of(weight, *chosen, bits)

    @classmethod
    def rounded(cls, weight: torch.Tensor, bits: int) -> "CodedWeight":
        """The codes of a weight: exact where it has been rounded before, else of its nearest."""
        return cls.exact(weight, bits) or cls.nearest(weight, bits)

    @classmethod
    def _of(cls, weight: torch.Tensor, scales: torch.Tensor, table: Sequence[int], bits: int) -> "CodedWeight":
        """The weight with its values rounded to levels of these scales."""
        rows = _rows(weight, bits)
        levels = torch.tensor(table, dtype=torch.int8, device=weight.device)
        pieces, height = [], _height(rows)
        for block, scale in zip(rows.split(height), scales.split(height)):
            kept = block != 0
            values = block[kept].float()
            ratios = values.abs() / _by_column(scale, block.shape[1])[kept].float()
            signed = nearest_magnitude(ratios, magnitudes(table)).copysign_(values)
            known = torch.bucketize(signed, levels.float()) if len(levels) else signed.to(torch.int8).view(torch.uint8)
            pieces.append(known.to(torch.uint8))
        kept = rows != 0
        codes = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=weight.device)
        mask = PackedMask(PackedMask.pack(kept).bits, tuple(weight.shape))
        return cls(mask, pack_codes(codes, kept, bits), scales, levels, bits, weight.dtype)

    @classmethod
    def of_parts(
        cls, tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], bits: int, dtype: torch.dtype
    ) -> "CodedWeight":
        """The weight of what [`CodedWeight.parts`] gave under a name."""
        mask = PackedMask(tensors[name + MASK], shape)
        return cls(mask, tensors[name + CODES], widen(tensors[name + SCALES]), tensors[name + TABLE], bits, dtype)

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """Mask, codes, scales and table, as they are recorded under a name: scales as uint8 codes if all are short."""
        codes_of_scales = narrow(self.scales)
        return {
            name + MASK: self.mask.bits,
            name + CODES: self.codes,
            name + SCALES: self.scales if codes_of_scales is None else codes_of_scales,
            name + TABLE: self.table,
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.mask.shape

    @property
    def nbytes(self) -> int:
        """Bytes that all four tensors take together."""
        return sum(part.nbytes for part in self.parts("").values())

    def is_storable(self) -> bool:
        """Whether its scales are some that files may have: in another dtype than it was made in, they may be out of range."""
        low, high = scale_range(self.dtype, magnitudes(self.table.tolist()))
        used = self.scales[self.scales != 0].float()
        return bool(((used >= low) & (used <= high)).all())

    def to(self, device: torch.device) -> "CodedWeight":
        """This weight on another device."""
        others = (part.to(device) for part in (self.codes, self.scales, self.table))
        return CodedWeight(self.mask.to(device), *others, self.bits, self.dtype)

    def unpack(self, device: torch.device | None = None) -> torch.Tensor:
        """The weight, on the device of its codes or on another.

        Raises:
            `ValueError`: mask, codes, scales and table disagree, or one of them is damaged.
        """
        if device is not None and device != self.codes.device:
            return self.to(device).unpack()
        check_mask_end(self.mask.bits, math.prod(self.shape))
        kept = self.mask.unpack().view(_matrix_shape(self.shape))
        check_scales(self.scales, kept, self.table.tolist(), self.bits, self.dtype)
        codes = unpack_codes(self.codes, kept, self.bits)
        levels = self.table[codes.int()] if self.bits < 8 else codes.view(torch.int8)
        if self.bits == 8 and ((levels == 0) | (levels == -128)).any():
            raise ValueError("its codes of 8 bits have 0 or -128 among them, which stand for nothing")
        rows = torch.zeros(kept.shape, dtype=self.dtype, device=codes.device)
        first, height = 0, _height(rows)
        for row, mask, scale in zip(rows.split(height), kept.split(height), self.scales.split(height)):
            wide = _by_column(scale, row.shape[1])[mask].float()
            row[mask] = (wide * levels[first : first + len(wide)]).to(self.dtype)
            first += len(wide)
        return rows.view(self.shape)

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.copy_(self.unpack(weight.device))

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return self.unpack(weight.device)


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _rows(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The weight as a matrix of rows. Raises `ValueError` if it cannot be coded."""
    check_bits(bits)
    if weight.ndim < 2 or weight.dtype not in CODED_DTYPES:
        raise ValueError(
            f"a weight of shape {list(weight.shape)} and {weight.dtype} cannot have values of {bits} bits: expected at "
            f"least two dimensions and one of {', '.join(map(str, CODED_DTYPES))}"
        )
    rows = weight.detach().reshape(_matrix_shape(weight.shape))
    if not all(bool(block.isfinite().all()) for block in rows.split(_height(rows))):
        raise ValueError(f"a weight with NaN or infinite values cannot have values of {bits} bits: mend it first")
    return rows


def _height(rows: torch.Tensor) -> int:
    """How many rows are computed with at a time."""
    return max(1, BLOCK // max(1, rows.shape[1]))


def _grouped(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Some rows at a time, by groups: float32, shape (rows * groups, 128), 0 behind the last column."""
    for block in rows.split(_height(rows)) if rows.numel() else ():
        yield torch.nn.functional.pad(block.float(), (0, -block.shape[1] % GROUP)).reshape(-1, GROUP)


def _joined(scales: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Scales of groups by rows."""
    shape = (rows.shape[0], -(-rows.shape[1] // GROUP))
    return torch.cat(scales).view(shape) if scales else rows.new_zeros(shape, dtype=torch.bfloat16)


def _by_column(scales: torch.Tensor, columns: int) -> torch.Tensor:
    """Of every element the scale of its group, shape (rows, columns)."""
    return scales.repeat_interleave(GROUP, 1)[:, :columns]
