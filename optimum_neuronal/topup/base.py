"""What a top-up is. To add one, add a file beside this one with a registered subclass of [`TopUp`]."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..decoder.projections import Decoder, Projection
from ..engine.sweep import Sweep
from ..metrics.statistics import SquaredNorms
from ..runtime.registry import Registry
from ..sparsity.plan import SparsityPlan


TOPUPS = Registry("top-up", __package__)
register_topup = TOPUPS.register

SMALLEST, LARGEST = 0.01, 0.99


@dataclass(frozen=True)
class Allocation:
    """What a top-up decided.

    Args:
        plan ([`SparsityPlan`]): where the sparsity goes.
        decisions (`dict`): how it was found, for the report; JSON-serialisable.
    """

    plan: SparsityPlan
    decisions: dict[str, Any] = field(default_factory=dict)


MEASURES = ("alignment", "deviation", "output", "reconstruction", "scores", "training")


@dataclass(frozen=True)
class Pass:
    """What a top-up asks of the sweep, told beforehand; where it cannot be known, the most that it may ask.

    Args:
        label (`str`): what the progress bar calls it.
        plans (`int`): how many plans are tried.
        reference (`str`): as [`Sweep`] takes it: `"sparse-stream"` or `"dense"`.
        measures (`str`):
            Which question is asked: `"alignment"` of [`Sweep.alignment_errors`], `"deviation"` of [`Sweep.deviation`],
            `"output"` of [`Sweep.output_errors`], `"scores"` of [`Sweep.dense_scores`]; or which run of its own the
            top-up makes: `"reconstruction"` of [`reconstruction_errors`]; `"training"` of BESA, which counts epochs
            as plans.
        sequences (`int`, *optional*): on how many of the alignment sequences; all if not given.
        times (`int`): how often it is asked.
    """

    label: str
    plans: int
    reference: str = "dense"
    measures: str = "alignment"
    sequences: int | None = None
    times: int = 1


@dataclass(frozen=True)
class TopUp(ABC):
    """Decides where the sparsity goes, on top of any saliency. The fields of a subclass are its hyper-parameters: the
    config gives it its `topup_args` and nothing else, in which sequences are lists, as JSON has them.

    Class attributes:
        uses_calibration (`bool`): False if `allocate` never asks the sweep for anything.
        rows_are_optional (`bool`): True if `allocate` leaves rows alone where the saliency cannot tell them apart.
        without_rows (`Mapping[str, Any]`): hyper-parameters with which rows are left alone; none if there are none.
        needs_fixed_weights (`bool`): True if it cannot serve a saliency that updates the weights that stay.
        refines (`bool`): True if `refine` edits masks.
        statistic (`type[SquaredNorms]`): what `refine` wants to know of the inputs of every projection.
    """

    name: ClassVar[str]
    uses_calibration: ClassVar[bool] = True
    rows_are_optional: ClassVar[bool] = False
    without_rows: ClassVar[Mapping[str, Any]] = {}
    needs_fixed_weights: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    statistic: ClassVar[type[SquaredNorms]] = SquaredNorms

    @property
    def by_row(self) -> bool:
        """Whether rows of one projection may get different sparsities."""
        return False

    def check(self, decoder: Decoder) -> None:
        """Raises `ValueError` if this top-up cannot serve the model. Called before any long work."""

    def passes(self) -> tuple[Pass, ...]:
        """What `allocate` asks the sweep for, in its order, if it abandons nothing: a dry run tells the cost by it."""
        return ()

    @abstractmethod
    def allocate(self, sweep: Sweep, sparsity: float) -> Allocation:
        """Decides the sparsity of every projection or row.

        Args:
            sweep ([`Sweep`]): the decoder, and what may be asked of it: dense activations, errors of trial plans.
            sparsity (`float`): share of all prunable weights to prune, in [0, 1).
        """

    def refine(
        self, projection: Projection, mask: torch.Tensor, score: torch.Tensor, statistic: SquaredNorms | None
    ) -> torch.Tensor:
        """Edits a final mask, if the class says that it `refines`. The default returns it unchanged.

        Args:
            projection ([`Projection`]): whose mask it is.
            mask (`Tensor`): boolean, shape (out, in), True where pruned.
            score (`Tensor` of float32, shape (out, in)): the saliency that the mask was made of.
            statistic ([`SquaredNorms`], *optional*): of the class's `statistic`; None if nothing was calibrated.
        """
        return mask


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
    low, high = -2.0, 2.0
    for _ in range(60):  # bisection
        shift = (low + high) / 2
        if ((values + shift).clamp(least, most) * weights).sum() < mean:
            low = shift
        else:
            high = shift
    return (values + high).clamp(least, most)
