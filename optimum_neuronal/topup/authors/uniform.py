"""Uniform sparsity as in the authors' code."""

from dataclasses import dataclass

from ...saliency.plan import Plan
from ...trials import PlanEvaluator
from ..base import Allocation, register_topup
from ..uniform import Uniform
from .plans import rounded


@register_topup("uniform", variant="authors")
@dataclass(frozen=True)
class AuthorsUniform(Uniform):
    """Prunes `int(in * s)` weights of every row, unless the saliency updates weights."""

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        return Allocation(rounded(evaluator, Plan.uniform(evaluator.decoder.projections, sparsity)))
