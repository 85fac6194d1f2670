"""Uniform: one sparsity for every row of every projection."""

from dataclasses import dataclass
from typing import ClassVar

from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from .base import Allocation, TopUp, register_topup
from .distribution import authors_rounding


@register_topup("uniform")
@dataclass(frozen=True)
class Uniform(TopUp):
    """The usual baseline, which costs nothing."""

    summary: ClassVar[str] = "Every projection has the same sparsity."
    decides: ClassVar[bool] = False
    uses_calibration: ClassVar[bool] = False

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        return Allocation(Plan.uniform(evaluator.decoder.projections, sparsity))


@register_topup("uniform", variant="authors")
@dataclass(frozen=True)
class AuthorsUniform(Uniform):
    """As in the authors' code: prunes `int(in * s)` weights of every row, unless the saliency updates weights."""

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        return Allocation(authors_rounding(evaluator, Plan.uniform(evaluator.decoder.projections, sparsity)))
