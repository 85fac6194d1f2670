"""The masks of another saliency, in which pruned weights are exchanged for kept ones, so that outputs keep their mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..blocks.statistics import InputSums, SquaredNorms, activation, wide_dtype
from ..model.change import Change, Zeros
from ..model.projections import Projection
from .base import Inputs, Saliency


SORTED_ROWS = 1024  # bounds the memory of sorting; rows are independent of each other


@dataclass(frozen=True)
class DSnoTRefinement(Saliency):
    """The exchange of Dynamic Sparse no Training (Zhang et al., DSnoT, ICLR 2024) in the masks of another saliency.

    Pruning shifts the expected output of a row by `eps = sum over pruned j of W_j E[x_j]`. In every cycle a row takes
    one weight back, with the largest `|W_j E[x_j]| / Var[x_j]` of the weights that reduce `|eps|`. It prunes the kept
    weight with the smallest Wanda metric of the weights that reduce `|eps|`. It stops when `|eps|` is at most
    `threshold`, before `eps` changes its sign, and when it has no more weights to exchange.

    Masks of starved experts do not change.

    Args:
        base ([`Saliency`]): makes the masks to begin with.
        cycles (`int`): weights that a row exchanges at most.
        threshold (`float`): rows whose mean output shifts by less are left alone.
    """

    statistic: ClassVar[type[SquaredNorms]] = InputSums

    base: Saliency
    cycles: int
    threshold: float

    @property
    def name(self) -> str:
        return self.base.name

    def title(self) -> str:
        return self.base.title()

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        return self.base.score(weight, activation)

    def adjusted(
        self, changes: dict[str, Change], projections: Sequence[Projection], inputs: Inputs
    ) -> dict[str, Change]:
        adjusted = dict(changes)
        for projection in projections:
            name, statistic = projection.name, inputs.statistics.get(projection.name)
            if self.cycles and statistic and statistic.tokens and name not in inputs.starved:
                adjusted[name] = Zeros(self.exchange(projection, changes[name].mask, statistic))
        return adjusted

    def exchange(self, projection: Projection, mask: torch.Tensor, statistic: InputSums) -> torch.Tensor:
        """Return the mask of a projection after the exchange: boolean, shape (out, in), True where kept."""
        inputs = *mean_and_variance(statistic), activation(statistic.value)
        parts = zip(projection.weight.split(SORTED_ROWS), mask.split(SORTED_ROWS))
        return torch.cat([self.exchange_rows(weight.float(), part, *inputs) for weight, part in parts])

    def exchange_rows(
        self, weight: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        """Return the mask after the exchange, shape (rows, in).

        `weight`: float32, `mask`: boolean, both of shape (rows, in). `mean`, `variance` and `norm` of the inputs: float32,
        shape (in,).
        """
        # A row's shift never changes its sign, so the order of exchanges is known, and all cycles are one cumulative sum.
        output = weight * mean  # share of every weight in its row's expected output
        shift = (output * ~mask).sum(dim=1, keepdim=True)
        sign = shift.sign()
        grown, may_grow = _ranked(output.abs() / variance, ~mask & (output.sign() == sign), self.cycles, True)
        fallen, may_fall = _ranked(weight.abs() * norm, mask & (output.sign() == -sign), self.cycles, False)
        after = shift + (output.gather(1, fallen) - output.gather(1, grown)).cumsum(dim=1)
        before = torch.cat([shift, after[:, :-1]], dim=1)
        goes_on = may_grow & may_fall & (before.abs() > self.threshold) & (after.sign() == sign)
        exchanged = goes_on.int().cumprod(dim=1).bool()
        refined = mask.scatter(1, grown, mask.gather(1, grown) | exchanged)
        return refined.scatter(1, fallen, refined.gather(1, fallen) & ~exchanged)


def mean_and_variance(statistic: InputSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of every input over all calibration tokens: float32, shape (in,), variances above 0."""
    wide = wide_dtype(statistic.value.device)
    mean = statistic.sums.to(wide).sum(dim=0) / statistic.tokens
    variance = statistic.value.to(wide).sum(dim=0) / statistic.tokens - mean.square()
    return mean.float(), above_zero(variance)


def above_zero(variance: torch.Tensor) -> torch.Tensor:
    """Return variances in float32, at least the smallest number: inputs that never vary come back first."""
    return variance.float().clamp(min=torch.finfo(torch.float32).tiny)


def _ranked(
    values: torch.Tensor, candidates: torch.Tensor, count: int, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every row's first `count` columns by value, candidates first, and True for the candidates among them."""
    last = -torch.inf if largest else torch.inf
    order = torch.where(candidates, values, last).sort(dim=1, descending=largest, stable=True).indices[:, :count]
    return order, candidates.gather(1, order)
