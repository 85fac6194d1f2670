"""The numbers that the scales of groups may be: positive bfloat16 numbers, or *short* ones, which 8 bits tell.

A short scale has four bits of fraction, 16 steps to a factor of 2, and lies between 2**-20 and 2**-4: that of a group whose
largest magnitude is between 0.00012 and 7. The byte that a group saves buys more than finer scales do (docs/few_bits.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


# The short scale of code c, 1 to 255, is the bfloat16 number with the bits (SHORT_BASE + c) << SHORT_SHIFT; 0 stands for 0.
SHORT_BASE, SHORT_SHIFT = (127 - 20) * 16, 3
MARGIN = 1.07  # by which factor scales are tried above that with which nothing is clipped


def widen(scales: torch.Tensor) -> torch.Tensor:
    """Scales as bfloat16, be they uint8 codes of short ones, int16 bits, or bfloat16 already."""
    if scales.dtype == torch.uint8:
        scales = torch.where(scales == 0, 0, scales.to(torch.int16).add_(SHORT_BASE) << SHORT_SHIFT)
    return scales.view(torch.bfloat16)


def narrow(scales: torch.Tensor) -> torch.Tensor | None:
    """The codes, uint8, of bfloat16 scales; `None` if not all of them are short."""
    bits = scales.contiguous().view(torch.int16)
    codes = (bits >> SHORT_SHIFT) - SHORT_BASE
    short = (bits == 0) | (bits.bitwise_and((1 << SHORT_SHIFT) - 1) == 0) & (codes > 0) & (codes < 256)
    return torch.where(bits == 0, 0, codes).to(torch.uint8) if bool(short.all()) else None


def scale_range(dtype: torch.dtype, levels: Sequence[int]) -> tuple[float, float]:
    """The least and the largest scale: with them no value of a dtype overflows, or vanishes among its subnormal numbers.

    Args:
        dtype (`torch.dtype`): of the weight.
        levels (`Sequence[int]`): positive, ascending.
    """
    limits = torch.finfo(dtype)
    least = max(torch.finfo(torch.bfloat16).tiny, 128 * limits.smallest_normal * limits.eps / levels[0])
    return _bfloat16(least, up=True), _bfloat16(limits.max / levels[-1], up=False)


@dataclass(frozen=True)
class ScaleGrid:
    """The scales that the groups of a weight may have.

    Args:
        low (`float`), high (`float`): the least and the largest.
        short (`bool`): whether they are short; else any of bfloat16 between these.
    """

    low: float
    high: float
    short: bool

    @classmethod
    def wide(cls, levels: Sequence[int], dtype: torch.dtype) -> "ScaleGrid":
        """All of [`scale_range`], short or not."""
        return cls(*scale_range(dtype, levels), short=False)

    @classmethod
    def of(cls, largest: torch.Tensor, levels: Sequence[int], dtype: torch.dtype) -> "ScaleGrid":
        """Short scales, if all groups can have such without a value clipped, else all of [`scale_range`].

        Args:
            largest (`Tensor`): magnitude in each group, float32, of any shape; 0 where nothing is kept.
            levels (`Sequence[int]`), dtype (`torch.dtype`): as for [`scale_range`].
        """
        wide = cls.wide(levels, dtype)
        grid = wide.narrowed()
        near = (largest[largest > 0] / levels[-1]).clamp_(min=wide.low)
        return grid if bool(((near * MARGIN >= grid.low) & (near * MARGIN <= grid.high)).all()) else wide

    def narrowed(self) -> "ScaleGrid":
        """The short scales among these."""
        low, high = torch.tensor([self.low, self.high]).bfloat16().view(torch.int16).tolist()
        codes = torch.tensor([-(-low >> SHORT_SHIFT) - SHORT_BASE, (high >> SHORT_SHIFT) - SHORT_BASE])
        return ScaleGrid(*widen(codes.clamp_(1, 255).to(torch.uint8)).tolist(), short=True)

    def nearest(self, scales: torch.Tensor) -> torch.Tensor:
        """The nearest of these to some scales, float32: bfloat16, of the same shape."""
        within = scales.clamp(self.low, self.high)
        if self.short:
            dropped = 16 + SHORT_SHIFT  # bits of a float32
            bits = (within.view(torch.int32) + (1 << (dropped - 1))) >> dropped << dropped
            within = bits.view(torch.float32)
        return within.bfloat16()


def _bfloat16(number: float, up: bool) -> float:
    """The nearest bfloat16 that is no less, or no greater, than a positive number."""
    rounded = torch.tensor(number, dtype=torch.float64).bfloat16().view(1)
    if rounded.double() < number if up else rounded.double() > number:
        rounded = (rounded.view(torch.int16) + (1 if up else -1)).view(torch.bfloat16)
    return float(rounded)
