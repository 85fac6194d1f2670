"""Quantised values for the kept weights, chosen together so that the outputs of a projection change least.

A value is an entry of a codebook times the scale of its row and group of columns, as [`CodedWeight`] stores them. Values
begin at the nearest entry. Each in turn then moves to the entry that is best while all others stay, and each scale to its
best for the entries. This is cyclic coordinate descent (Behdin et al., QuantEase, 2023, without zeros). The loss
`||(W - V) X||^2` never grows on the way. A codebook is given by the magnitudes of its entries.
"""

from collections.abc import Sequence

import torch

from ..formats.code_scales import fit_scales
from ..formats.codebooks import TABLES, magnitudes
from ..formats.coded import GROUP
from ..formats.scale_grid import ScaleGrid
from ..system.machine import full_precision
from .base import DAMPENING


PASSES = 8  # over all values, at most
SAMPLED = 256  # rows by which a codebook is chosen


def choose_codebook(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], bits: int, dtype: torch.dtype) -> list[int]:
    """Return the known codebook that is nearest to sparse weights together.

    Args:
        parts (`Sequence[tuple[Tensor, Tensor]]`):
            Weights of shape (out, in), and the cost of a squared error of each input's weights, shape (in,), all float32.
        bits (`int`): of a value: 8, 4, 3 or 2.
        dtype (`torch.dtype`): of the final weights.
    """
    errors = []
    for table in TABLES[bits]:
        codebook, error = magnitudes(table), 0.0
        for weight, importance in parts:
            some = weight[:: -(-len(weight) // SAMPLED)].contiguous()
            grid = _grid(some, codebook, dtype)
            for group in _groups(weight.shape[1]):
                error += float(_fit(some, importance, group, codebook, grid)[1].double().sum())
        errors.append(error)
    return magnitudes(TABLES[bits][errors.index(min(errors))])


def round_nearest(
    weight: torch.Tensor, importance: torch.Tensor, codebook: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a sparse weight with each value at the nearest entry, for the scales of least error.

    Args:
        weight (`Tensor` of float32, shape (out, in)): not changed.
        importance (`Tensor` of float32, shape (in,)): cost of a squared error of each input's weights.
        codebook (`Sequence[int]`): from [`choose_codebook`].
        dtype (`torch.dtype`): of the final weight.

    Returns:
        `Tensor`: float32, shape (out, in); in `dtype`, [`CodedWeight.exact`] has codes for it.
    """
    return _Rounded(weight, importance, codebook, dtype).values


def round_kept(
    weight: torch.Tensor,
    target: torch.Tensor,
    hessian: torch.Tensor,
    codebook: Sequence[int],
    dtype: torch.dtype,
    passes: int = PASSES,
) -> torch.Tensor:
    """Return a sparse weight with quantised values on its support that make up for each other's rounding.

    Args:
        weight (`Tensor` of float32, shape (out, in)): V; not changed.
        target (`Tensor` of float32, shape (out, in)): the dense weight W that it stands for.
        hessian (`Tensor` of float32, shape (in, in)): sum of `x x^T` over the projection's inputs; not changed.
        codebook (`Sequence[int]`), dtype (`torch.dtype`): as for [`round_nearest`].
        passes (`int`): over all values, at most.

    Returns:
        `Tensor`: as for [`round_nearest`].
    """
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = torch.where(mean > 0, mean, 1)  # of inputs that are always zero
    diagonal += DAMPENING * mean
    rounded = _Rounded(weight, diagonal, codebook, dtype)
    with full_precision():
        rounded.descend(target, hessian, passes)
    return rounded.values


def _groups(columns: int) -> list[slice]:
    return [slice(start, min(start + GROUP, columns)) for start in range(0, columns, GROUP)]


def _grid(weight: torch.Tensor, codebook: Sequence[int], dtype: torch.dtype) -> ScaleGrid:
    largest = [weight[:, group].abs().amax(1) for group in _groups(weight.shape[1])]
    return ScaleGrid.of(torch.stack(largest), codebook, dtype)


def _fit(weight: torch.Tensor, importance: torch.Tensor, group: slice, codebook: Sequence[int], grid: ScaleGrid):
    return fit_scales(weight[:, group].abs(), codebook, grid, importance[group])


class _Rounded:
    """Quantised values that are improved by coordinate descent.

    Args:
        weight (`Tensor`), importance (`Tensor`), codebook (`Sequence[int]`), dtype (`torch.dtype`): as for [`round_nearest`].

    Attributes:
        values (`Tensor`): float32, shape (out, in).
    """

    def __init__(self, weight: torch.Tensor, importance: torch.Tensor, codebook: Sequence[int], dtype: torch.dtype):
        weight = weight.contiguous()  # a Conv1D's is stored as (in, out)
        self._kept, groups = weight != 0, _groups(weight.shape[1])
        self._codebook = torch.tensor(codebook, dtype=torch.float32, device=weight.device)
        self._between = (self._codebook[1:] + self._codebook[:-1]) / 2
        self._grid = _grid(weight, codebook, dtype)
        self._scales = [_fit(weight, importance, group, codebook, self._grid)[0].float() for group in groups]
        parts = [self._nearest(weight[:, g], scales[:, None]) for g, scales in zip(groups, self._scales)]
        self.values = torch.cat(parts, dim=1).masked_fill_(~self._kept, 0)

    def _nearest(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        nearest = self._codebook[torch.bucketize((values / scales).abs_(), self._between)]
        return nearest.copysign_(values).mul_(scales)

    def descend(self, target: torch.Tensor, hessian: torch.Tensor, passes: int) -> None:
        """Move values and scales until none gets better, or for so many passes."""
        for _ in range(passes):
            before = self.values.clone()
            for place, group in enumerate(_groups(target.shape[1])):
                residual = (target - self.values) @ hessian[:, group]
                self._descend_group(place, group, residual, hessian[group, group])
            if torch.equal(before, self.values):
                break

    def _descend_group(self, place: int, group: slice, residual: torch.Tensor, hessian: torch.Tensor) -> None:
        """Move the values of a group, column by column, then its scales.

        Args:
            residual (`Tensor` of shape (out, group)): the values' gradient, but for a factor of -2.
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
        entries = (
            (values / scales).round_().masked_fill_(~kept, 0)
        )  # so that values stay products of two short numbers
        self._scales[place] = torch.where(step != 0, better, scales)
        self.values[:, group] = (entries * self._scales[place]).T
