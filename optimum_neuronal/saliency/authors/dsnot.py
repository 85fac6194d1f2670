"""DSnoT's exchange as in the code of NeuronAL's authors."""

from dataclasses import dataclass

import torch

from ...blocks.statistics import InputSums, activation, wide_dtype
from ...model.architectures import MLP_ENTRIES
from ...model.projections import Projection
from ..dsnot import DSnoTRefinement, above_zero


@dataclass(frozen=True)
class AuthorsDSnoTRefinement(DSnoTRefinement):
    """Leaves the MLP alone. Shifts are sums over a sequence's tokens and may change their sign.

    A row without other weights to restore takes a kept one. Finished rows wait for the others, and may still prune.
    """

    def exchange(self, projection: Projection, mask: torch.Tensor, statistic: InputSums) -> torch.Tensor:
        if projection.role in (*MLP_ENTRIES, "down"):
            return mask
        weight, inputs = projection.weight.float(), (*mean_and_variance(statistic), activation(statistic.value))
        return self.exchange_rows(weight, mask, *inputs)

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


def mean_and_variance(statistic: InputSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over sequences of every input's sum, and of its variance: float32, shape (in,), variances above 0."""
    wide = wide_dtype(statistic.value.device)
    sums, squares, tokens = statistic.sums.to(wide), statistic.value.to(wide), statistic.tokens
    tokens = tokens / len(sums)
    variance = (squares / tokens - (sums / tokens).square()).mean(dim=0)
    return sums.mean(dim=0).float(), above_zero(variance)
