"""DSnoT: exchange of pruned weights of a finished mask for kept ones, so that outputs keep their mean."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..blocks.statistics import InputSums, SquaredNorms, activation, wide_dtype
from ..common.validation import hyper
from ..model.projections import Projection
from ..trials import Trials
from .base import BASELINE_VARIANTS, Allocation, TopUp, register_topup
from .uniform import Uniform


ROWS_AT_A_TIME = 1024  # bounds the memory of sorting; rows are independent of each other


@register_topup("dsnot")
@dataclass(frozen=True)
class DSnoT(TopUp):
    """Dynamic Sparse no Training (Zhang et al., DSnoT, ICLR 2024), on top of uniform sparsity.

    Pruning shifts the expected output of a row by `eps = sum over pruned j of W_j E[x_j]`. In every cycle a row takes
    one weight back, with the largest `|W_j E[x_j]| / Var[x_j]` of the weights that reduce `|eps|`. It prunes the kept
    weight with the smallest Wanda metric of the weights that reduce `|eps|`. It stops when `|eps|` is at most
    `threshold`, before `eps` changes its sign, and when it has no more weights to exchange.

    Args:
        cycles (`int`): the paper's T: weights that a row exchanges at most.
        threshold (`float`): the paper's epsilon: shift of a row's output, on average over all tokens, that is left
            alone, at least 0.
        variant (`str`): `"authors"`, their code as it was run: docs/methods.md says what differs.
    """

    paper: ClassVar[str] = (
        "Zhang et al., Dynamic Sparse No Training: Training-Free Fine-tuning for Sparse LLMs, ICLR 2024"
    )
    uses_calibration: ClassVar[bool] = False  # in `allocate`; `refine` gets the statistic
    needs_fixed_weights: ClassVar[bool] = True  # an exchange would undo an update's compensation
    refines: ClassVar[bool] = True
    statistic: ClassVar[type[SquaredNorms]] = InputSums

    cycles: int = hyper(50, 0)
    threshold: float = hyper(0.1, 0)
    variant: str = hyper("corrected", choices=BASELINE_VARIANTS)

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        return Uniform(self.variant).allocate(trials, sparsity)

    def refine(
        self, projection: Projection, mask: torch.Tensor, score: torch.Tensor, statistic: InputSums | None
    ) -> torch.Tensor:
        if statistic is None or not statistic.tokens or not self.cycles:
            return mask
        authors = self.variant == "authors"
        if authors and "mlp" in projection.name.split("."):
            return mask
        mean, variance = mean_and_variance(statistic, authors)
        norm, exchange = activation(statistic.value), self._exchange_as_authors if authors else self._exchange
        rows = len(mask) if authors else ROWS_AT_A_TIME  # the authors' rows wait for each other
        parts = zip(projection.weight.split(rows), mask.split(rows))
        return torch.cat([exchange(weight.float(), part, mean, variance, norm) for weight, part in parts])

    def _exchange(
        self, weight: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
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

    def _exchange_as_authors(
        self, weight: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        output, kept, mask = weight * mean, int(mask[0].sum()), mask.clone()
        shift = (output * ~mask).sum(dim=1, keepdim=True)
        restored = torch.where(mask, 0, output / variance).sort(dim=1, stable=True).indices
        pruned = torch.where(mask, weight.abs() * norm, torch.inf).sort(dim=1, stable=True).indices[:, :kept]
        places = output.gather(1, pruned).sign() * torch.arange(kept, 0, -1, device=weight.device)
        pruned = pruned.gather(1, places.argsort(dim=1))  # negative outputs first, then positive ones backwards
        active, ends = torch.ones_like(shift, dtype=torch.bool), torch.tensor([0, -1], device=weight.device)
        grow, fall = (ends.repeat(len(weight), 1) for _ in range(2))  # two pointers move inwards through each list
        for _ in range(min(self.cycles, kept)):
            up, down = (shift > 0).long(), (shift < 0).long()
            grown = restored.gather(1, grow.gather(1, up) % restored.shape[1])
            fallen = pruned.gather(1, fall.gather(1, down) % kept)
            grow.scatter_add_(1, up, 1 - 2 * up)
            fall.scatter_add_(1, down, 1 - 2 * down)
            active &= shift.abs() > self.threshold
            mask.scatter_(1, fallen, ~active).scatter_(1, grown, active)
            shift = shift + torch.where(active, output.gather(1, fallen), 0)
            shift = shift - torch.where(active, output.gather(1, grown), 0)
            if not active.any():
                break
        return mask


def mean_and_variance(statistic: InputSums, by_sequence: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of every input over all calibration tokens: float32, shape (in,), variances above 0.

    `by_sequence`: the mean over sequences of an input's sum, and of its variance within the sequence.
    """
    wide = wide_dtype(statistic.value.device)
    sums, squares, tokens = statistic.sums.to(wide), statistic.value.to(wide), statistic.tokens
    if by_sequence:
        mean, tokens = sums.mean(dim=0), tokens / len(sums)
        variance = (squares / tokens - (sums / tokens).square()).mean(dim=0)
    else:
        mean = sums.sum(dim=0) / tokens
        variance = squares.sum(dim=0) / tokens - mean.square()
    tiny = torch.finfo(torch.float32).tiny  # inputs that never vary come back first
    return mean.float(), variance.float().clamp(min=tiny)


def _ranked(
    values: torch.Tensor, candidates: torch.Tensor, count: int, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every row's first `count` columns by value, candidates first, and True for the candidates among them."""
    last = -torch.inf if largest else torch.inf
    order = torch.where(candidates, values, last).sort(dim=1, descending=largest, stable=True).indices[:, :count]
    return order, candidates.gather(1, order)
