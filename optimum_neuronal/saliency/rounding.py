"""Values of few bits for the weights that stay, chosen together so that the outputs of a projection change least.

A value is a level of a table times the scale of its row and group of columns, as [`CodedWeight`] stores them. Beginning
with the nearest, every value in turn moves to the level that is best while all the others are as they are, and every scale
to its best for the levels: cyclic coordinate descent, as Behdin et al., QuantEase, 2023, do it without zeros. The loss
`||(W - V) X||^2` never grows on the way.
"""

from collections.abc import Sequence

import torch

from ..formats.code_scales import fit_scales
from ..formats.codebooks import TABLES, magnitudes
from ..formats.coded import GROUP
from ..formats.scale_grid import ScaleGrid
from ..system.compute import full_precision


SWEEPS = 8  # over all values, at most
SAMPLED = 256  # rows by which a table is chosen
DAMPENING = 0.01  # share of the Hessian's mean diagonal that is added to its diagonal


def choose_levels(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], bits: int, dtype: torch.dtype) -> list[int]:
    """Magnitudes of the levels, of those known, that sparse weights together are nearest to.

    Args:
        parts (`Sequence[tuple[Tensor, Tensor]]`):
            Weights of shape (out, in), and what a squared error of each input's weights counts, shape (in,), all float32.
        bits (`int`): of a value: 8, 4, 3 or 2.
        dtype (`torch.dtype`): of the weights that are rounded in the end.
    """
    errors = []
    for table in TABLES[bits]:
        levels, error = magnitudes(table), 0.0
        for weight, importance in parts:
            some = weight[:: -(-len(weight) // SAMPLED)].contiguous()
            grid = _grid(some, levels, dtype)
            for group in _groups(weight.shape[1]):
                error += float(_fit(some, importance, group, levels, grid)[1].double().sum())
        errors.append(error)
    return magnitudes(TABLES[bits][errors.index(min(errors))])


def round_nearest(
    weight: torch.Tensor, importance: torch.Tensor, levels: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A sparse weight with each value at the nearest level, the scales being those that err least.

    Args:
        weight (`Tensor` of float32, shape (out, in)): not changed.
        importance (`Tensor` of float32, shape (in,)): what a squared error of each input's weights counts.
        levels (`Sequence[int]`): from [`choose_levels`].
        dtype (`torch.dtype`): of the weight that the result is rounded to afterwards.

    Returns:
        `Tensor`: float32, shape (out, in); in `dtype`, [`CodedWeight.exact`] has codes for it.
    """
    return _Rounded(weight, importance, levels, dtype).values


def round_kept(
    weight: torch.Tensor,
    target: torch.Tensor,
    hessian: torch.Tensor,
    levels: Sequence[int],
    dtype: torch.dtype,
    sweeps: int = SWEEPS,
) -> torch.Tensor:
    """A sparse weight with values of few bits on the same support, which make up for each other's rounding.

    Args:
        weight (`Tensor` of float32, shape (out, in)): V, whose values that are not zero stay; not changed.
        target (`Tensor` of float32, shape (out, in)): the dense weight W that it stands for.
        hessian (`Tensor` of float32, shape (in, in)): sum of `x x^T` over the projection's inputs; not changed.
        levels (`Sequence[int]`), dtype (`torch.dtype`): as for [`round_nearest`], and so is what is returned.
        sweeps (`int`): over all values, at most.
    """
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = torch.where(mean > 0, mean, 1)  # of inputs that are always zero
    diagonal += DAMPENING * mean
    rounded = _Rounded(weight, diagonal, levels, dtype)
    with full_precision():
        rounded.descend(target, hessian, sweeps)
    return rounded.values


def fitted_weights(shape: tuple[int, int], bits: int) -> int:
    """Weights that scales are fitted to for a weight of shape (out, in): those that tables are chosen by, and all of them."""
    rows, columns = shape
    return columns * (rows + len(TABLES[bits]) * -(-rows // -(-rows // SAMPLED)))


def sweep_operations(shape: tuple[int, int]) -> int:
    """Floating-point operations that a sweep of [`round_kept`] takes for a weight of shape (out, in), beside moving values."""
    rows, columns = shape
    return 2 * rows * columns**2


def _groups(columns: int) -> list[slice]:
    return [slice(start, min(start + GROUP, columns)) for start in range(0, columns, GROUP)]


def _grid(weight: torch.Tensor, levels: Sequence[int], dtype: torch.dtype) -> ScaleGrid:
    largest = [weight[:, group].abs().amax(1) for group in _groups(weight.shape[1])]
    return ScaleGrid.of(torch.stack(largest), levels, dtype)


def _fit(weight: torch.Tensor, importance: torch.Tensor, group: slice, levels: Sequence[int], grid: ScaleGrid):
    return fit_scales(weight[:, group].abs(), levels, grid, importance[group])


class _Rounded:
    """Values that are levels of scales, and how they get better.

    Args:
        weight (`Tensor`), importance (`Tensor`), levels (`Sequence[int]`), dtype (`torch.dtype`): as for [`round_nearest`].

    Attributes:
        values (`Tensor`): float32, shape (out, in).
    """

    def __init__(self, weight: torch.Tensor, importance: torch.Tensor, levels: Sequence[int], dtype: torch.dtype):
        weight = weight.contiguous()  # not so where it is kept as (in, out)
        self._kept, groups = weight != 0, _groups(weight.shape[1])
        self._levels = torch.tensor(levels, dtype=torch.float32, device=weight.device)
        self._between = (self._levels[1:] + self._levels[:-1]) / 2
        self._grid = _grid(weight, levels, dtype)
        self._scales = [_fit(weight, importance, group, levels, self._grid)[0].float() for group in groups]
        parts = [self._nearest(weight[:, g], scales[:, None]) for g, scales in zip(groups, self._scales)]
        self.values = torch.cat(parts, dim=1).masked_fill_(~self._kept, 0)

    def _nearest(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        level = self._levels[torch.bucketize((values / scales).abs_(), self._between)]
        return level.copysign_(values).mul_(scales)

    def descend(self, target: torch.Tensor, hessian: torch.Tensor, sweeps: int) -> None:
        """Moves values and scales until none gets better, or often enough."""
        for _ in range(sweeps):
            before = self.values.clone()
            for place, group in enumerate(_groups(target.shape[1])):
                residual = (target - self.values) @ hessian[:, group]
                self._descend_group(place, group, residual, hessian[group, group])
            if torch.equal(before, self.values):
                break

    def _descend_group(self, place: int, group: slice, residual: torch.Tensor, hessian: torch.Tensor) -> None:
        """One pass over the columns of a group, then its scales.

        Args:
            residual (`Tensor` of shape (out, group)): what the values' gradient is, but for a factor of -2.
            hessian (`Tensor` of shape (group, group)): of the group's inputs.
        """
        scales, before = self._scales[place], self.values[:, group].T.contiguous()
        values, left, kept = before.clone(), residual.T.contiguous(), self._kept[:, group].T.contiguous()
        diagonal = hessian.diagonal().tolist()
        for column in range(len(values)):
            best = values[column] + left[column] / diagonal[column]
            new = torch.where(kept[column], self._nearest(best, scales), 0)
            left[column + 1 :].addr_(hessian[column, column + 1 :], new - values[column], alpha=-1)
            values[column] = new
        moved = hessian @ values
        gain = (values * (residual.T - hessian @ (values - before))).sum(dim=0)
        curvature = (values * moved).sum(dim=0)
        better = self._grid.nearest(scales * (1 + gain / curvature)).float()
        step = better / scales - 1
        step = torch.where(step * (step * curvature - 2 * gain) < 0, step, 0)  # not if rounding takes it too far
        levels = (values / scales).round_().masked_fill_(~kept, 0)  # so that values stay products of two short numbers
        self._scales[place] = torch.where(step != 0, better, scales)
        self.values[:, group] = (levels * self._scales[place]).T
