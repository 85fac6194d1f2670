"""The levels that few-bit codes of kept values stand for: small tables of int8 numbers.

Zeros are in the mask, so no level is zero; tables are symmetric, so that a level is told by a sign and a magnitude. Of 8
bits there is no table: a code is the level itself, in two's complement, never 0 and never -128.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch


BITS = (8, 4, 3, 2)
LARGEST = 127

# Magnitudes of the known tables. The first are uniform. Values that survive a prune leave a gap around zero, the wider the
# more has been pruned, and most are small: the others begin at a gap of their own, of 3 and 4 bits with growing steps.
MAGNITUDES = {
    2: (
        (42, 127),
        (51, 127),
        (57, 127),
        (64, 127),
        (70, 127),
        (76, 127),
        (83, 127),
    ),
    3: (
        (18, 54, 91, 127),
        (13, 43, 83, 127),
        (19, 48, 85, 127),
        (25, 53, 88, 127),
        (32, 57, 90, 127),
        (38, 62, 93, 127),
        (44, 67, 95, 127),
        (51, 71, 98, 127),
    ),
    4: (
        (8, 25, 42, 59, 76, 93, 110, 127),
        (6, 18, 33, 50, 68, 87, 107, 127),
        (13, 24, 38, 54, 71, 89, 108, 127),
        (19, 29, 43, 58, 74, 91, 109, 127),
        (25, 35, 48, 62, 77, 93, 110, 127),
        (32, 41, 53, 66, 80, 95, 111, 127),
        (38, 47, 58, 70, 84, 97, 112, 127),
    ),
}

# For each number of bits the tables that are known: 2**bits levels each, ascending, the largest of them 127.
TABLES: dict[int, tuple[tuple[int, ...], ...]] = {
    8: ((),),
    **{
        bits: tuple((*(-size for size in reversed(sizes)), *sizes) for sizes in known)
        for bits, known in MAGNITUDES.items()
    },
}


def check_bits(bits: int) -> None:
    """Raises `ValueError` if there is no format of values with so many bits."""
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"values of {bits!r} bits are not known: expected one of {', '.join(map(str, BITS))}")


def check_table(table: Sequence[int], bits: int) -> None:
    """Raises `ValueError` if these are no levels of so many bits: whole numbers of -127 to 127, ascending, symmetric, no zero."""
    levels = [int(level) for level in table]
    if len(levels) != (0 if bits == 8 else 2**bits):
        raise ValueError(f"its table has {len(levels)} levels: expected {0 if bits == 8 else 2**bits} for {bits} bits")
    ascending = all(lower < upper for lower, upper in zip(levels, levels[1:]))
    if (
        not ascending
        or 0 in levels
        or levels != [-level for level in reversed(levels)]
        or max(levels, default=0) > LARGEST
    ):
        raise ValueError(
            f"its table is {levels}: expected levels of -{LARGEST} to {LARGEST}, ascending, symmetric and without zero"
        )


def magnitudes(table: Sequence[int]) -> list[int]:
    """The positive levels of a table, ascending; of 8 bits, whose table is empty, 1 to 127."""
    return [int(level) for level in table if level > 0] or list(range(1, LARGEST + 1))


def nearest_magnitude(ratios: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
    """The nearest of some positive levels.

    Args:
        ratios (`Tensor`): magnitudes of weights in units of their scales, float32, at least 0; of two levels that are
            equally near, either is taken.
        levels (`Sequence[int]`): positive, ascending, as [`magnitudes`] gives them.

    Returns:
        `Tensor`: levels as float32, of the same shape.
    """
    if len(levels) == LARGEST:  # all of them
        return ratios.round().clamp_(1, LARGEST)
    places = (ratios * 2).nan_to_num_(0).clamp_(max=2 * LARGEST).to(torch.int32)
    return _nearest_of_halves(tuple(levels), ratios.device).index_select(0, places.flatten()).view(ratios.shape)


@lru_cache(maxsize=64)
def _nearest_of_halves(levels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The level that is nearest to what lies between two half numbers, for each of them: float32, shape (255,).

    Levels are whole, so that half numbers part them: looking halves up is ten times as fast as a search for each ratio.
    """
    known = torch.tensor(levels, dtype=torch.float32, device=device)
    middles = (known[1:] + known[:-1]) / 2
    return known[torch.bucketize((torch.arange(2 * LARGEST + 1, device=device) + 0.5) / 2, middles)]
