"""Inputs of projections rounded to whole numbers, 128 columns with one scale: the arithmetic that kernels do, in torch."""

import torch

from ..formats.coded import GROUP


SMALLEST = torch.finfo(torch.float32).tiny  # below it a scale is taken for zero


def to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x to the nearest of 255 numbers of each group of 128 columns, halves to even.

    Args:
        x (`Tensor`): floating, shape (rows, columns).

    Returns:
        `tuple[Tensor, Tensor]`: whole numbers from -127 to 127 in float32, shape (rows, groups, 128), 0 behind the last
        column; and what they are to be multiplied with, float32, shape (rows, groups): the largest magnitude / 127. A
        group that is nearly zero has the scale 0, one with infinite or undefined numbers the scale NaN.
    """
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -(-x.shape[1] // GROUP), GROUP)
    largest = groups.abs().amax(-1)
    scales = largest / 127
    scales = torch.where(scales >= SMALLEST, scales, 0.0)
    numbers = torch.where(scales[..., None] > 0, (groups / scales[..., None]).round(), 0.0)
    finite = largest.isfinite()
    return torch.where(finite[..., None], numbers, 0.0), torch.where(finite, scales, torch.nan)
