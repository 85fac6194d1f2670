"""DSnoT: uniform sparsity, with masks in which pruned weights are exchanged for kept ones, so that outputs keep their mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..blocks.statistics import SquaredNorms, activation, wide_dtype
from ..common.validation import hyper
from ..model.architectures import MLP_ENTRIES
from ..model.change import Change, Zeros
from ..model.projections import Projection
from ..saliency import Inputs
from ..trials import PlanEvaluator
from .base import Allocation, register_topup
from .uniform import AuthorsUniform, Uniform


SORTED_ROWS = 1024  # bounds the memory of sorting; rows are independent of each other


class InputSums(SquaredNorms):
    """Squared norms, and `sums`: the sum of the inputs over the tokens of every sequence, (sequences, in)."""

    def __init__(self):
        super().__init__()
        self._sums: list[torch.Tensor] = []

    def _add_sums(self, inputs: torch.Tensor) -> None:
        super()._add_sums(inputs)
        self._sums.append(inputs.sum(dim=1))

    @property
    def sums(self) -> torch.Tensor:
        return torch.cat(self._sums)


@dataclass(frozen=True)
class DSnoTRefinement:
    """The exchange of weights in the masks of a block.

    Pruning shifts the expected output of a row by `eps = sum over pruned j of W_j E[x_j]`. In every cycle a row takes
    one weight back, with the largest `|W_j E[x_j]| / Var[x_j]` of the weights that reduce `|eps|`. It prunes the kept
    weight with the smallest Wanda metric of the weights that reduce `|eps|`. It stops when `|eps|` is at most
    `threshold`, before `eps` changes its sign, and when it has no more weights to exchange.

    Masks of starved experts do not change.
    """

    cycles: int
    threshold: float

    def __call__(
        self, changes: Mapping[str, Change], projections: Sequence[Projection], inputs: Inputs
    ) -> dict[str, Change]:
        refined = dict(changes)
        for projection in projections:
            name, statistic = projection.name, inputs.statistics.get(projection.name)
            if self.cycles and statistic and statistic.tokens and name not in inputs.starved:
                refined[name] = Zeros(self.exchange(projection, changes[name].mask, statistic))
        return refined

    def exchange(self, projection: Projection, mask: torch.Tensor, statistic: InputSums) -> torch.Tensor:
        """Return the mask of a projection after the exchange: boolean, shape (out, in), True where kept."""
        inputs = *self.moments(statistic), activation(statistic.value)
        parts = zip(projection.weight.split(SORTED_ROWS), mask.split(SORTED_ROWS))
        return torch.cat([self.exchange_rows(weight.float(), part, *inputs) for weight, part in parts])

    def moments(self, statistic: InputSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance of every input over all calibration tokens: float32, shape (in,), variances above 0."""
        wide = wide_dtype(statistic.value.device)
        mean = statistic.sums.to(wide).sum(dim=0) / statistic.tokens
        variance = statistic.value.to(wide).sum(dim=0) / statistic.tokens - mean.square()
        return mean.float(), _above_zero(variance)

    def exchange_rows(
        self, weight: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        """Return the mask after the exchange, shape (rows, in).

        `weight`: float32, `mask`: boolean, both of shape (rows, in). `mean`, `variance` and `norm` of the inputs: float32,
        shape (in,), variances above 0.
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


@dataclass(frozen=True)
class AuthorsDSnoTRefinement(DSnoTRefinement):
    """Leaves the MLP alone. Shifts are sums over a sequence's tokens and may change their sign.

    A row without other weights to restore takes a kept one. Finished rows wait for the others, and may still prune.
    """

    def exchange(self, projection: Projection, mask: torch.Tensor, statistic: InputSums) -> torch.Tensor:
        if projection.role in (*MLP_ENTRIES, "down"):
            return mask
        inputs = *self.moments(statistic), activation(statistic.value)
        return self.exchange_rows(projection.weight.float(), mask, *inputs)

    def moments(self, statistic: InputSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean over sequences of every input's sum, and of its variance within a sequence."""
        wide = wide_dtype(statistic.value.device)
        sums, squares = statistic.sums.to(wide), statistic.value.to(wide)
        tokens = statistic.tokens / len(sums)
        variance = (squares / tokens - (sums / tokens).square()).mean(dim=0)
        return sums.mean(dim=0).float(), _above_zero(variance)

    def exchange_rows(
        self, weight: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        output, kept, mask = weight * mean, int(mask[0].sum()), mask.clone()
        shift = (output * ~mask).sum(dim=1, keepdim=True)
        restored = torch.where(mask, 0, output / variance).sort(dim=1, stable=True).indices
        pruned = torch.where(mask, weight.abs() * norm, torch.inf).sort(dim=1, stable=True).indices[:, :kept]
        places = output.gather(1, pruned).sign() * torch.arange(kept, 0, -1, device=weight.device)
        order = places.argsort(dim=1)  # negative outputs first, then positive ones backwards
        order *= places.gather(1, order) != 0  # the first weight stands for those without output
        pruned = pruned.gather(1, order)
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


def _above_zero(variance: torch.Tensor) -> torch.Tensor:
    """Return variances in float32, at least the smallest number: inputs that never vary come back first."""
    return variance.float().clamp(min=torch.finfo(torch.float32).tiny)


def _ranked(
    values: torch.Tensor, candidates: torch.Tensor, count: int, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every row's first `count` columns by value, candidates first, and True for the candidates among them."""
    last = -torch.inf if largest else torch.inf
    order = torch.where(candidates, values, last).sort(dim=1, descending=largest, stable=True).indices[:, :count]
    return order, candidates.gather(1, order)


@register_topup("dsnot")
@dataclass(frozen=True)
class DSnoT(Uniform):
    """Dynamic Sparse no Training (Zhang et al., DSnoT, ICLR 2024), on top of uniform sparsity. See [`DSnoTRefinement`].

    Args:
        cycles (`int`): the paper's T: weights that a row exchanges at most.
        threshold (`float`): the paper's epsilon, at least 0: rows whose mean output shifts by less are left alone.
    """

    paper: ClassVar[str] = (
        "Zhang et al., Dynamic Sparse No Training: Training-Free Fine-tuning for Sparse LLMs, ICLR 2024"
    )
    decides: ClassVar[bool] = True  # an exchange would break an N:M pattern
    uses_calibration: ClassVar[bool] = True
    needs_fixed_weights: ClassVar[bool] = True  # an exchange would undo an update's compensation
    uniform: ClassVar[type[Uniform]] = Uniform
    refinement: ClassVar[type[DSnoTRefinement]] = DSnoTRefinement

    cycles: int = hyper(50, 0)
    threshold: float = hyper(0.1, 0)

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        plan = self.uniform().allocate(evaluator, sparsity).plan
        return Allocation(plan, norms=InputSums, refine=self.refinement(self.cycles, self.threshold))


@register_topup("dsnot", variant="authors")
@dataclass(frozen=True)
class AuthorsDSnoT(DSnoT):
    """Exchanges weights as the code of NeuronAL's authors does, on top of its uniform sparsity."""

    uniform: ClassVar[type[Uniform]] = AuthorsUniform
    refinement: ClassVar[type[DSnoTRefinement]] = AuthorsDSnoTRefinement
