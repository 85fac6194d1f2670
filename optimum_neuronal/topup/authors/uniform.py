"""Uniform sparsity as in the authors' code."""

from dataclasses import dataclass

from ...saliency.plan import Plan
from ...trials import PlanEvaluator
from ..base import Allocation, register_topup
from ..distribution import authors_rounding
from ..uniform import Uniform


@register_topup("uniform", variant="authors")
@dataclass(frozen=True)
class AuthorsUniform(Uniform):
    """Prunes `int(in * s)` weights of every row, unless the saliency updates weights."""

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        return Allocation(authors_rounding(evaluator, Plan.uniform(evaluator.decoder.projections, sparsity)))
