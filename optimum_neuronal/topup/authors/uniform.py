"""Uniform sparsity as in the authors' code."""

from dataclasses import dataclass

from ...saliency.plan import Plan
from ...trials import Trials
from ..base import Allocation, register_topup
from ..uniform import Uniform
from .plans import rounded


@register_topup("uniform", variant="authors")
@dataclass(frozen=True)
class AuthorsUniform(Uniform):
    """Prunes `int(in * s)` weights of every row, unless the saliency updates weights."""

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        return Allocation(rounded(trials, Plan.uniform(trials.decoder.projections, sparsity)))
