"""Spreads sparsity around its mean: by a direction (the paper's GetDist), or by shifting what was spread otherwise."""

import torch

from .choosing import bisect


SMALLEST, LARGEST = 0.01, 0.99  # what no sparsity exceeds


def get_dist(sparsity: float, lam: float, values: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Spreads sparsity around its mean, within a window of `2 * lam`: large values get less of it (paper, Eq. 4).

    `density = 2 lam (v - min v) / (max v - min v)`, shifted to the mean density `1 - sparsity`. Sparsities are kept
    within [0.01, 0.99] without moving their mean. Constant values give `sparsity` everywhere.

    Args:
        sparsity (`float`): the mean, in [0, 1).
        lam (`float`): half the window's width, in [0, 1].
        values (`Tensor`, shape (n,)): the direction v: what should be spared is large.
        weights (`Tensor`, shape (n,), *optional*): how many weights each entry stands for; equal if not given.

    Returns:
        `Tensor`: float64 on the CPU, shape (n,).
    """
    values = values.double().cpu()
    weights = torch.ones_like(values) if weights is None else weights.double()
    weights = weights / weights.sum()
    span = values.max() - values.min()
    if span == 0 or lam == 0 or not SMALLEST <= sparsity <= LARGEST:
        return torch.full_like(values, sparsity)
    density = 2 * lam * (values - values.min()) / span
    spread = (density * weights).sum() - density + sparsity
    return spread if spread.min() >= SMALLEST and spread.max() <= LARGEST else shift_to_mean(spread, sparsity, weights)


def shift_to_mean(
    values: torch.Tensor, mean: float, weights: torch.Tensor, least: float = SMALLEST, most: float = LARGEST
) -> torch.Tensor:
    """Adds the same to all values, which are then kept within bounds, so that their weighted mean is as wanted.

    Args:
        values (`Tensor` of float64, shape (n,)): within [-1, 2].
        mean (`float`): within the bounds.
        weights (`Tensor`, shape (n,)): how many weights each value stands for.
        least, most (`float`): the bounds, within [0, 1].
    """
    weights = weights.double() / weights.sum()
    _, shift = bisect(lambda shift: bool(((values + shift).clamp(least, most) * weights).sum() < mean), -2.0, 2.0, 60)
    return (values + shift).clamp(least, most)
