"""What the headers of a file tell of a coded weight, checked before a byte of it is read, and what its parts tell after that.

Errors are `ValueError`s that do not name the tensor, as those of [`bitmask`].
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from .bitmask import ALIGNMENT, check_mask_header, row_stride
from .codebooks import check_bits, check_table, magnitudes
from .scale_grid import scale_range


GROUP = 128  # columns that share a scale
SCALE_DTYPES = (torch.bfloat16, torch.uint8)  # of scales in files, see scale_grid
CODED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of weights whose values can have few bits


def check_coded_headers(
    shape: Sequence[int], bits: Any, group: Any, dtype: Any, parts: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    """Raises `ValueError` if what headers tell of a coded weight does not agree.

    Args:
        shape (`Sequence[int]`): of the matrix that is coded, rows first.
        bits, group, dtype: as the metadata have them, the dtype as torch's, or None if it is not known.
        parts (`Sequence`): dtype and shape of mask, codes, scales and table.
    """
    check_bits(bits)
    if type(group) is not int or group != GROUP:
        raise ValueError(f"its scales are for groups of {group!r} columns: expected {GROUP}")
    if dtype not in CODED_DTYPES:
        raise ValueError(f"its dtype is {dtype}: expected one of {', '.join(map(str, CODED_DTYPES))}")
    mask, codes, scales, table = parts
    check_mask_header(shape, mask[1], mask[0])
    rows, columns = math.prod(shape[:-1]), shape[-1]
    expected = {
        "scales": (scales, SCALE_DTYPES, (rows, -(-columns // GROUP))),
        "table": (table, (torch.int8,), (0 if bits == 8 else 2**bits,)),
    }
    for name, (found, dtypes, expected_shape) in expected.items():
        if found[0] not in dtypes or found[1] != expected_shape:
            raise ValueError(
                f"its {name} have dtype {found[0]} and shape {list(found[1])}: expected {' or '.join(map(str, dtypes))} and "
                f"{list(expected_shape)} for {bits} bits and a weight of shape {list(shape)}"
            )
    most = rows * -(-columns // ALIGNMENT) * ALIGNMENT * bits // 8
    if codes[0] != torch.uint8 or len(codes[1]) != 1 or codes[1][0] > most:
        raise ValueError(
            f"its codes have dtype {codes[0]} and shape {list(codes[1])}: expected torch.uint8 and one dimension of at most "
            f"{most} for {bits} bits and a weight of shape {list(shape)}"
        )


def check_scales(
    scales: torch.Tensor, kept: torch.Tensor, table: Sequence[int], bits: int, dtype: torch.dtype
) -> None:
    """Raises `ValueError` if table or scales are none that can be of these kept elements.

    Args:
        scales (`Tensor`): bfloat16.
        kept (`Tensor`): boolean, shape (rows, columns).
        table (`Sequence[int]`): levels.
        bits (`int`): of codes.
        dtype (`torch.dtype`): of the weight.
    """
    check_table(table, bits)
    shape = (kept.shape[0], -(-kept.shape[1] // GROUP))
    if tuple(scales.shape) != shape:
        raise ValueError(f"its scales have shape {list(scales.shape)}: expected {list(shape)}")
    used = torch.nn.functional.pad(kept, (0, -kept.shape[1] % GROUP)).view(*shape, GROUP).any(-1)
    check_used_scales(scales, used, scale_range(dtype, magnitudes(table)), "nothing is kept there")


def check_used_scales(
    scales: torch.Tensor, used: torch.Tensor, bounds: tuple[float, float], why_zero: str, first: int = 0
) -> None:
    """Raises `ValueError` unless scales are within bounds where they are used, and 0 elsewhere.

    Args:
        scales (`Tensor`): bfloat16, shape (rows, groups).
        used (`Tensor`): boolean, of the same shape.
        bounds (`tuple[float, float]`): the least and the largest, from [`scale_range`].
        why_zero (`str`): of a scale that is not used, for the message.
        first (`int`): number of the first row, for the message.
    """
    low, high = bounds
    outside = ~((scales.float() >= low) & (scales.float() <= high))
    wrong = torch.where(used, outside, scales.view(torch.int16) != 0)
    if wrong.any():
        row, group = wrong.nonzero()[0].tolist()
        expected = f"one of {low:.3g} to {high:.3g}" if used[row, group] else f"0, since {why_zero}"
        raise ValueError(
            f"its scale of row {first + row} and group {group} is {float(scales[row, group])}: expected {expected}"
        )


def coded_bytes(shape: tuple[int, int], kept: int, bits: int) -> int:
    """Bytes that a matrix takes with values of few bits: its mask, codes, scales and table.

    How kept elements lie decides how many bits are padding between words; counted is what it is on average.
    """
    rows, columns = shape
    return -(-rows * columns // 8) + _behind_mask(shape, kept, bits)


def coded_rows_bytes(shape: tuple[int, int], kept: int, bits: int) -> int:
    """Bytes that such a matrix takes to be computed with: as [`rows_bytes`] has it of values with all bits."""
    rows, columns = shape
    return rows * row_stride(columns) + _behind_mask(shape, kept, bits) + 8 * (rows + 1)


def _behind_mask(shape: tuple[int, int], kept: int, bits: int) -> int:
    rows, columns = shape
    padding = (8 - math.gcd(bits, 8)) / 2 * min(kept, rows * -(-columns // ALIGNMENT))
    scales = rows * -(-columns // GROUP)  # short ones
    return math.ceil((kept * bits + padding) / 8) + scales + (0 if bits == 8 else 2**bits)
