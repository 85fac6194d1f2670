"""Sparsity by block, distributed around a mean: what several top-ups have in common."""

import math
from collections.abc import Callable

import numpy as np
import torch

from ..model.projections import Block, Decoder, Projection
from ..saliency.plan import Plan
from ..saliency.wanda import Wanda
from ..trials import PlanEvaluator


LEAST_SPARSITY, MOST_SPARSITY = 0.01, 0.99  # bounds of sparsities


def pruned_blocks(decoder: Decoder) -> list[Block]:
    """Return the blocks with prunable weights, in order. The user may have excluded all projections of a block."""
    return [block for block in decoder.blocks if block.pruned]


def block_sizes(decoder: Decoder) -> torch.Tensor:
    """Return the number of prunable weights of every block that has some: float64, shape (blocks,)."""
    return torch.tensor([block.numel for block in pruned_blocks(decoder)], dtype=torch.float64)


def plan_of_blocks(decoder: Decoder, sparsities: torch.Tensor | np.ndarray) -> Plan:
    """Return the plan that gives every projection the sparsity of its block, shape (blocks,)."""
    blocks = zip(pruned_blocks(decoder), sparsities.tolist())
    return Plan({name: value for block, value in blocks for name in block.pruned_names})


# Position of a block from 0 (first) to 1 (last) -> rise of its sparsity, from 0 to 1. The paper has no formula for the
# last two: here they mirror each other on the diagonal.
SCHEDULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda position: position,
    "exponential": lambda position: position.exp().sub(1) / (math.e - 1),
    "logarithmic": lambda position: position.mul(math.e - 1).log1p(),
}


def rise(blocks: int, schedule: str) -> torch.Tensor:
    """Return how far sparsity has risen in each block, from 0 to 1: float64, shape (blocks,)."""
    position = torch.arange(blocks, dtype=torch.float64) / max(blocks - 1, 1)
    return SCHEDULES[schedule](position)


def distribute_over_blocks(decoder: Decoder, sparsity: float, lam: float, values: torch.Tensor) -> Plan:
    """Return the plan with one sparsity per pruned block, see [`get_dist`]; values, shape (blocks,)."""
    return plan_of_blocks(decoder, get_dist(sparsity, lam, values, block_sizes(decoder)))


def get_dist(sparsity: float, lam: float, values: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Spread sparsity around its mean, in a window of `2 * lam`: entries with large values are pruned less (Eq. 4).

    `density = 2 lam (v - min v) / (max v - min v)`, shifted to the mean density `1 - sparsity`. Sparsities are clipped
    to [0.01, 0.99] without moving their mean. Constant values give `sparsity` everywhere.

    Args:
        sparsity (`float`): the mean, in [0, 1).
        lam (`float`): half the window's width, in [0, 1].
        values (`Tensor`, shape (n,)): the direction v.
        weights (`Tensor`, shape (n,), *optional*): number of weights of each entry; equal by default.

    Returns:
        `Tensor`: float64 on the CPU, shape (n,).
    """
    values = values.double().cpu()
    weights = torch.ones_like(values) if weights is None else weights.double()
    weights = weights / weights.sum()
    span = values.max() - values.min()
    if span == 0 or lam == 0 or not LEAST_SPARSITY <= sparsity <= MOST_SPARSITY:
        return torch.full_like(values, sparsity)
    density = 2 * lam * (values - values.min()) / span
    sparsities = (density * weights).sum() - density + sparsity
    fits = sparsities.min() >= LEAST_SPARSITY and sparsities.max() <= MOST_SPARSITY
    return sparsities if fits else shift_to_mean(sparsities, sparsity, weights)


def authors_dist(values: np.ndarray, sparsity: float, lam: float) -> np.ndarray:
    """Return sparsities as [`get_dist`] of the authors' code does, all of shape (blocks,).

    Blocks are weighted equally, and the mean moves away from `sparsity` if a sparsity leaves (0, 1). Masks depend on the
    last bit of these numbers, so the order of operations is that of their numpy code.
    """
    density = (values - values.min()) * (1 / (np.ptp(values) or 1) * lam * 2)
    sparsities = 1 - (density - np.mean(density) + (1 - sparsity))
    return np.where(sparsities <= 0, LEAST_SPARSITY, np.where(sparsities >= 1, MOST_SPARSITY, sparsities))


def authors_rounding(evaluator: PlanEvaluator, plan: Plan) -> Plan:
    """Return the plan that prunes `int(in * sparsity)` weights of a row, or the same if the saliency updates weights."""
    if evaluator.saliency.updates_weights:
        return plan
    widths = {name: projection.shape[1] for name, projection in evaluator.decoder.projections.items()}
    return Plan({name: int(widths[name] * share) / widths[name] for name, share in plan.sparsity.items()})


def shift_to_mean(values: torch.Tensor, mean: float, weights: torch.Tensor) -> torch.Tensor:
    """Add one number to all values and clip them to [0.01, 0.99], so that their weighted mean is `mean`.

    values, float64 within [-1, 2], and weights both have shape (n,).
    """
    weights = weights.double() / weights.sum()

    def shifted(shift: float) -> torch.Tensor:
        return (values + shift).clamp(LEAST_SPARSITY, MOST_SPARSITY)

    return shifted(bisect(lambda shift: bool((shifted(shift) * weights).sum() < mean), -2.0, 2.0, 60))


def bisect(is_too_small: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """Return the smallest number found that is large enough, by bisection of an interval."""
    for _ in range(steps):
        middle = (low + high) / 2
        if is_too_small(middle):
            low = middle
        else:
            high = middle
    return high


def wanda_metric(projection: Projection, activations: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return `|W_ij| a_j` of a projection, whatever the run's saliency: float32, shape (out, in)."""
    return Wanda().score(projection.weight.float(), activations[projection.name])
