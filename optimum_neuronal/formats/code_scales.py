"""The scale that a row's kept values share within a group of columns: found where values were rounded, or fitted.

Tables are symmetric, so all of it computes with magnitudes: float32, shape (groups, columns of a group), 0 where pruned.
A scale is a positive bfloat16; each value is the float32 product of scale and level, rounded to the weight's dtype.
"""

from collections.abc import Sequence

import torch

from .codebooks import nearest_magnitude
from .scale_grid import ScaleGrid


# Of the largest magnitude of a group, which part the largest level stands for. Below 1 the largest values are clipped,
# which errs less on all the others.
CLIPPING = (1.0, 1.05, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4)
TRIED = 2**17  # scales at a time
PROBED = 16  # values on which a scale is tried before it is on all of its group
NEIGHBOURS = (0, 1, -1, 2, -2)  # a value's rounding moves the scale that is found from it by less than 2 steps


def find_scales(magnitudes: torch.Tensor, levels: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """The scales of values that were rounded: with them each is a level times its group's scale, bit for bit.

    Short ones where all groups have such.

    Returns:
        `Tensor`: bfloat16, shape (groups,), 0 where a group keeps nothing; `None` where a group has no such scale.
    """
    # The smallest tell scales apart best: large ones lie so close that many a wrong scale has a level for them.
    ordered = torch.where(magnitudes == 0, torch.inf, magnitudes).sort(1).values
    ordered = ordered.masked_fill_(ordered == torch.inf, 0)
    wide = ScaleGrid.wide(levels, dtype)
    found = _find_on_grid(ordered, levels, dtype, wide.narrowed())
    return _find_on_grid(ordered, levels, dtype, wide) if found is None else found


def _find_on_grid(
    ordered: torch.Tensor, levels: Sequence[int], dtype: torch.dtype, grid: ScaleGrid
) -> torch.Tensor | None:
    scales = torch.zeros(len(ordered), dtype=torch.bfloat16, device=ordered.device)
    left = ordered.any(1).nonzero().flatten()
    for largest in (levels[-1:], levels):  # mostly the largest magnitude is that of the largest level
        for groups in left.split(max(1, TRIED // (len(largest) * len(NEIGHBOURS)))):
            scales[groups] = _first_exact(ordered[groups], largest, levels, dtype, grid)
            if largest is levels and not scales[groups].all():
                return None
        left = left[scales[left] == 0]
    return scales


def _first_exact(
    ordered: torch.Tensor, largest: Sequence[int], levels: Sequence[int], dtype: torch.dtype, grid: ScaleGrid
) -> torch.Tensor:
    """Of every group a scale with which its values are levels; 0 if there is none.

    Args:
        ordered (`Tensor`): magnitudes, those that are not 0 ascending.
        largest (`Sequence[int]`): levels, ascending, one of which the largest magnitude is.
        levels (`Sequence[int]`), dtype (`torch.dtype`): as for [`find_scales`].
        grid ([`ScaleGrid`]): the scales to choose among.
    """
    top, level = ordered.amax(1)[:, None, None], torch.tensor(largest[::-1], device=ordered.device)[:, None]
    tried = _near(top / level, grid)
    fits = (tried >= grid.low) & (tried <= grid.high) & ((tried.float() * level).to(dtype).float() == top)
    groups, candidates = fits.nonzero()[:, 0], tried[fits]
    for values in (ordered[:, :PROBED], ordered):
        exact = _is_exact(values[groups], candidates, levels, dtype)
        groups, candidates = groups[exact], candidates[exact]
    first = groups.diff(prepend=groups.new_tensor([-1])) != 0
    scales = torch.zeros(len(ordered), dtype=torch.bfloat16, device=ordered.device)
    scales[groups[first]] = candidates[first]
    return scales


def _near(scales: torch.Tensor, grid: ScaleGrid) -> torch.Tensor:
    """Scales that a value may have been rounded with which tells these, shape (..., 1): bfloat16, shape (..., some)."""
    if grid.short:  # they lie far apart
        return grid.nearest(scales)
    steps = torch.tensor(NEIGHBOURS, dtype=torch.int16, device=scales.device)
    return (scales.bfloat16().view(torch.int16) + steps).view(torch.bfloat16)


def fit_scales(
    magnitudes: torch.Tensor, levels: Sequence[int], grid: ScaleGrid, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales with which values are rounded to their nearest levels with the least squared error, of those tried.

    Tried are the clippings of [`CLIPPING`], and of the best the scale that is best for the levels chosen with it.

    Args:
        magnitudes (`Tensor`), levels (`Sequence[int]`): as above.
        grid ([`ScaleGrid`]): the scales to choose among.
        importance (`Tensor` of float32, shape (columns of a group,), *optional*): what a squared error counts. None: 1.

    Returns:
        `tuple`: scales, bfloat16, shape (groups,), 0 where a group keeps nothing; squared errors, float32, shape (groups,).
    """
    largest, kept = magnitudes.amax(1), _kept(magnitudes)

    def rounded(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales as they are stored, and the errors with them."""
        scales = grid.nearest(scales)
        errors = round_to_levels(magnitudes, kept, scales, levels).sub_(magnitudes).square_()
        return scales, (errors if importance is None else errors.mul_(importance)).sum(1)

    best, least = rounded(largest / levels[-1])
    for part in CLIPPING[1:]:
        best, least = _better(best, least, *rounded(largest * (part / levels[-1])))
    chosen = round_to_levels(magnitudes, kept, best, levels).div_(best[:, None].float())
    counted = chosen if importance is None else chosen * importance
    best, least = _better(best, least, *rounded((counted * magnitudes).sum(1) / (counted * chosen).sum(1)))
    return best.masked_fill(largest == 0, 0), least


def round_to_levels(
    magnitudes: torch.Tensor, kept: torch.Tensor, scales: torch.Tensor, levels: Sequence[int]
) -> torch.Tensor:
    """The magnitudes with each that is kept rounded to its nearest level, in float32; scales are of shape (groups,)."""
    scale = scales.float()[:, None]
    return nearest_magnitude(magnitudes / scale, levels).mul_(scale).mul_(kept)


def _kept(magnitudes: torch.Tensor) -> torch.Tensor:
    """1 where a magnitude is not 0, as float32: a product with booleans takes seven times as long as one with floats."""
    return (magnitudes != 0).float()


def _is_exact(
    magnitudes: torch.Tensor, scales: torch.Tensor, levels: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return (round_to_levels(magnitudes, _kept(magnitudes), scales, levels).to(dtype).float() == magnitudes).all(1)


def _better(scales: torch.Tensor, errors: torch.Tensor, others: torch.Tensor, their_errors: torch.Tensor):
    """Of two scales of each group the one that errs less, the first where they err alike."""
    other = their_errors < errors
    return torch.where(other, others, scales), torch.where(other, their_errors, errors)
