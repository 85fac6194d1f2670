"""Levels: weights that a saliency has solved at a few sparsities, from which a trial of any sparsity is interpolated.

A method that updates the kept weights makes other choices good than a method that leaves them. To solve anew for every
candidate would take too long. Between two solutions of near sparsities the weights change little.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..model.projections import Projection
from ..packed.change import NewWeight
from ..packed.formats.sparse import sparse_bytes
from ..saliency.plan import Plan, SparsityPlan
from .solved import SolvedWeights


SHARES = (2.0, 1.5, 1.2, 1.0, 0.75, 0.45, 0.2)  # of the kept weights at the target sparsity, from level to level


def level_sparsities(target: float) -> tuple[float, ...]:
    """Return the sparsities to solve, ascending: narrow around the target, wide far from it.

    Args:
        target (`float`): of all projections, in (0, 1).
    """
    kept = (share * (1 - target) for share in SHARES)
    return tuple(1 - share for share in kept if share < 1)


@dataclass(frozen=True, eq=False)
class Levels(SolvedWeights):
    """The weights of all blocks at every level, a sparsity in (0, 1). At 0 a weight is the dense one, at 1 it is zero."""

    name: ClassVar[str] = "levels"
    label: ClassVar[str] = "Levels"
    instead: ClassVar[str] = "set levels=False in topup_args"

    def plan(self, names: Iterable[str], place: int) -> SparsityPlan:
        return SparsityPlan(dict.fromkeys(names, self.amounts[place]))

    def nbytes(self, projection: Projection) -> int:
        count, size = projection.numel, projection.owner.dtype.itemsize
        return sum(sparse_bytes(projection.shape, round(count * (1 - sparsity)), size) for sparsity in self.amounts)

    def change(self, tensors: Mapping[str, torch.Tensor], plan: Plan, projection: Projection) -> NewWeight:
        sparsity = plan.amounts[projection.name]
        if isinstance(sparsity, torch.Tensor) and sparsity.ndim:
            raise ValueError(f"{projection.name} was given a sparsity by row: levels are of whole projections.")
        return NewWeight(self._weight(tensors, projection, float(sparsity)))

    def _weight(self, tensors: Mapping[str, torch.Tensor], projection: Projection, sparsity: float) -> torch.Tensor:
        """Return the weight at any sparsity, shape (out, in), in the projection's dtype and on its device."""
        known = (0.0, *self.amounts, 1.0)
        above = next(place for place in range(1, len(known)) if sparsity <= known[place])
        if sparsity == known[above]:
            return self._level(tensors, projection, above)
        share = (sparsity - known[above - 1]) / (known[above] - known[above - 1])
        return torch.lerp(*(self._level(tensors, projection, place) for place in (above - 1, above)), share)

    def _level(self, tensors: Mapping[str, torch.Tensor], projection: Projection, place: int) -> torch.Tensor:
        if place == 0:
            return projection.weight
        if place > len(self.amounts):
            return torch.zeros_like(projection.weight)
        return self.stored(tensors, projection, place - 1).applied(projection.weight)
