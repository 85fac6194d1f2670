"""Helpers of several top-ups: sparsity by block, spread around its mean; and search for a number or a candidate."""

from collections.abc import Callable, Hashable, Sequence

import torch

from ..model.projections import Block, Decoder, Projection
from ..saliency.plan import SparsityPlan
from ..saliency.wanda import Wanda
from ..trials import Trials


SMALLEST, LARGEST = 0.01, 0.99  # bounds of spread sparsities


def pruned_blocks(decoder: Decoder) -> list[Block]:
    """Return the blocks with prunable weights, in order: the user may ignore all projections of a block."""
    return [block for block in decoder.blocks if block.pruned]


def block_sizes(blocks: Sequence[Block]) -> torch.Tensor:
    """Return the number of prunable weights of every block: float64, shape (blocks,)."""
    return torch.tensor([block.numel for block in blocks], dtype=torch.float64)


def uniform_plan(decoder: Decoder, sparsity: float) -> SparsityPlan:
    """Return the plan that gives every projection the same sparsity."""
    return SparsityPlan(dict.fromkeys(decoder.projections, sparsity))


def plan_of_blocks(blocks: Sequence[Block], sparsities: torch.Tensor) -> SparsityPlan:
    """Return the plan that gives every projection the sparsity of its block, shape (blocks,)."""
    return SparsityPlan(
        {name: value for block, value in zip(blocks, sparsities.tolist()) for name in block.pruned_names}
    )


def spread_over_blocks(blocks: Sequence[Block], sparsity: float, lam: float, values: torch.Tensor) -> SparsityPlan:
    """Return the plan with one sparsity per block, see [`get_dist`]; values, shape (blocks,)."""
    return plan_of_blocks(blocks, get_dist(sparsity, lam, values, block_sizes(blocks)))


def block_scores(trials: Trials, score: Callable[[Block, dict[str, torch.Tensor]], float], label: str) -> torch.Tensor:
    """Return a score of every block with prunable weights: float64, shape (blocks,). See [`Trials.dense_scores`]."""

    def visit(block: Block, activations: dict[str, torch.Tensor]) -> list[float]:
        return [score(block, activations)] if block.pruned else []

    return torch.tensor([value for found in trials.dense_scores(visit, label) for value in found], dtype=torch.float64)


def wanda_metric(projection: Projection, activations: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return `|W_ij| a_j` of a projection, whatever the prune's saliency: float32, shape (out, in)."""
    return Wanda().score(projection.weight.float(), activations[projection.name])


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
    if span == 0 or lam == 0 or not SMALLEST <= sparsity <= LARGEST:
        return torch.full_like(values, sparsity)
    density = 2 * lam * (values - values.min()) / span
    spread = (density * weights).sum() - density + sparsity
    return spread if spread.min() >= SMALLEST and spread.max() <= LARGEST else shift_to_mean(spread, sparsity, weights)


def shift_to_mean(
    values: torch.Tensor, mean: float, weights: torch.Tensor, least: float = SMALLEST, most: float = LARGEST
) -> torch.Tensor:
    """Add one number to all values and clip them to [least, most], so that their weighted mean is `mean`.

    values, float64 within [-1, 2], and weights both have shape (n,).
    """
    weights = weights.double() / weights.sum()
    _, shift = bisect(lambda shift: bool(((values + shift).clamp(least, most) * weights).sum() < mean), -2.0, 2.0, 60)
    return (values + shift).clamp(least, most)


def index_of_smallest(values: Sequence[float]) -> int:
    """Return the index of the smallest value, the first of equal ones."""
    return min(range(len(values)), key=values.__getitem__)


def bisect(is_too_small: Callable[[float], bool], low: float, high: float, steps: int) -> tuple[float, float]:
    """Halve an interval around the smallest number that is not too small. Return its ends; `high` is never too small."""
    for _ in range(steps):
        middle = (low + high) / 2
        if is_too_small(middle):
            low = middle
        else:
            high = middle
    return low, high


def draw(generator: torch.Generator, below: int) -> int:
    """Return a random integer from 0 to `below - 1`."""
    return int(torch.randint(below, (), generator=generator))


def distinct(make: Callable[[], Hashable | None], count: int, attempts: int) -> list:
    """Return up to `count` different results of `make`, which may give None; fewer if all attempts are used up."""
    found: dict[Hashable, None] = {}
    for _ in range(attempts):
        one = make()
        if one is not None:
            found[one] = None
        if len(found) == count:
            break
    return list(found)
