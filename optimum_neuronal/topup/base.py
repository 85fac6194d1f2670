"""Base class of top-ups, and what several of them share: sparsity by block, spread around its mean, and search.

To add a top-up, add a file beside this one with a registered subclass of [`TopUp`].
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..blocks.statistics import SquaredNorms
from ..common.registry import Registry
from ..model.projections import Block, Decoder, Projection
from ..saliency import Saliency
from ..saliency.plan import Plan, SparsityPlan
from ..saliency.wanda import Wanda
from ..trials import Trials


SMALLEST, LARGEST = 0.01, 0.99  # bounds of spread sparsities
BASELINE_VARIANTS = ("corrected", "authors")  # of the methods that the paper compares with


@dataclass(frozen=True)
class Allocation:
    """Decision of a top-up: sparsity of every projection or row, and how it was found, for the report (JSON)."""

    plan: Plan
    decisions: dict[str, Any] = field(default_factory=dict)
    norms: type[SquaredNorms] = SquaredNorms  # see [`Trials`], for the final pass


@dataclass(frozen=True)
class TopUp(ABC):
    """A method that decides the sparsity of every projection or row, on top of any saliency.

    The fields of a subclass are its hyper-parameters. They come from the config's `topup_args`, sequences as lists.

    Class attributes:
        decides (`bool`): False if every weight matrix gets the config's sparsity, as an N:M pattern demands.
        uses_calibration (`bool`): False if `allocate` never measures anything.
        needs_fixed_weights (`bool`): True if it cannot serve a saliency that updates the kept weights.
        compares_outputs (`bool`): True if `allocate` needs a language-model head, to compare next-token distributions.
        refines (`bool`): True if `refine` edits masks.
        statistic (`type[SquaredNorms]`): statistic of every projection's inputs that `refine` needs.
        paper (`str`): what to cite; the model card does. Empty: nothing.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    decides: ClassVar[bool] = True
    uses_calibration: ClassVar[bool] = True
    needs_fixed_weights: ClassVar[bool] = False
    compares_outputs: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    statistic: ClassVar[type[SquaredNorms]] = SquaredNorms

    def suited_to(self, decoder: Decoder) -> "TopUp":
        """Return this top-up, or a copy with hyper-parameters that suit the model. Raise `ValueError` if none do.

        Called before any long work.
        """
        if self.compares_outputs and not decoder.predicts_next_token:
            raise ValueError(
                f"The top-up {self.name!r} compares next-token distributions, but {type(decoder.model).__name__} has no "
                "causal language-model head. Choose 'search', which then uses alignment errors, or 'neuronal'."
            )
        return self

    def forwards(self, decoder: Decoder, saliency: Saliency, aligned: int, samples: int) -> int:
        """Return roughly how often `allocate` runs a block on one sequence, of so many alignment and calibration sequences."""
        return 0

    def solves(self, saliency: Saliency) -> float:
        """Return roughly how often `allocate` masks or solves each projection."""
        return 0

    @abstractmethod
    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        """Decide the sparsity of every projection, or of every row if the saliency `knows_rows`.

        Args:
            trials ([`Trials`]): the decoder, and measurements on it: dense activations, errors of candidate plans.
            sparsity (`float`): share of all prunable weights to prune, in [0, 1); bits per weight of a prune that quantizes.
        """

    def refine(
        self, projection: Projection, mask: torch.Tensor, score: torch.Tensor, statistic: SquaredNorms | None
    ) -> torch.Tensor:
        """Edit a final mask, if the class `refines`.

        Args:
            projection ([`Projection`]): the projection of the mask.
            mask (`Tensor`): boolean, shape (out, in), True where kept.
            score (`Tensor` of float32, shape (out, in)): the saliency behind the mask.
            statistic ([`SquaredNorms`], *optional*): of the class's `statistic`; None if nothing was calibrated.
        """
        return mask


TOPUPS: Registry[TopUp] = Registry("top-up", __package__)
register_topup = TOPUPS.register


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


# Position of a block from 0 (first) to 1 (last) -> rise of its sparsity, from 0 to 1. The paper has no formula for the
# last two: here they mirror each other on the diagonal.
SCHEDULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda position: position,
    "exponential": lambda position: position.exp().sub(1) / (math.e - 1),
    "logarithmic": lambda position: position.mul(math.e - 1).log1p(),
}


def rise(blocks: int, schedule: str) -> torch.Tensor:
    """Return how far sparsity has risen in each of so many blocks, from 0 to 1: float64, shape (blocks,)."""
    position = torch.arange(blocks, dtype=torch.float64) / max(blocks - 1, 1)
    return SCHEDULES[schedule](position)


def spread_over_blocks(blocks: Sequence[Block], sparsity: float, lam: float, values: torch.Tensor) -> SparsityPlan:
    """Return the plan with one sparsity per block, see [`get_dist`]; values, shape (blocks,)."""
    return plan_of_blocks(blocks, get_dist(sparsity, lam, values, block_sizes(blocks)))


def rounded(trials: Trials, plan: SparsityPlan, variant: str) -> SparsityPlan:
    """Return the plan. The authors' prunes `int(in * sparsity)` weights of a row if the saliency updates no weights."""
    if variant != "authors" or trials.saliency.updates_weights:
        return plan
    widths = {name: projection.shape[1] for name, projection in trials.decoder.projections.items()}
    return SparsityPlan({name: int(widths[name] * share) / widths[name] for name, share in plan.sparsity.items()})


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
    shift = bisect(lambda shift: bool(((values + shift).clamp(least, most) * weights).sum() < mean), -2.0, 2.0, 60)
    return (values + shift).clamp(least, most)


def bisect(is_too_small: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """Return about the smallest number in an interval that is not too small, and never one that is."""
    for _ in range(steps):
        middle = (low + high) / 2
        if is_too_small(middle):
            low = middle
        else:
            high = middle
    return high


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
