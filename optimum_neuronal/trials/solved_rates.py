"""Solved rates: weights that were quantised to a few numbers of bits before trials ask for them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..model.projections import Projection
from ..packed.change import Change, NewWeight
from ..packed.formats.quantized import quantized_bytes
from ..saliency.plan import DENSE, Plan, RatePlan
from .solved import SolvedWeights


@dataclass(frozen=True, eq=False)
class SolvedRates(SolvedWeights):
    """The quantised weights of all blocks. A plan gives a projection one of the solved numbers of bits, or leaves it dense."""

    name: ClassVar[str] = "rates"
    label: ClassVar[str] = "Rates"
    instead: ClassVar[str] = "set topup='uniform'"

    def plan(self, names: Iterable[str], place: int) -> RatePlan:
        return RatePlan(dict.fromkeys(names, int(self.amounts[place])))

    def nbytes(self, projection: Projection) -> int:
        return sum(quantized_bytes(projection.shape, int(bits), steps=True) for bits in self.amounts)

    def change(self, tensors: Mapping[str, torch.Tensor], plan: Plan, projection: Projection) -> Change:
        bits = plan.amounts[projection.name]
        if bits == DENSE:
            return NewWeight(projection.weight)
        return self.stored(tensors, projection, self.amounts.index(bits))
