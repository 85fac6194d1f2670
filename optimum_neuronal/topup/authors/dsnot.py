"""DSnoT as in the authors' code."""

from dataclasses import dataclass

from ...saliency import Saliency
from ...saliency.authors.dsnot import AuthorsDSnoTRefinement
from ...trials import PlanEvaluator
from ..base import Allocation, register_topup
from ..dsnot import DSnoT
from .uniform import AuthorsUniform


@register_topup("dsnot", variant="authors")
@dataclass(frozen=True)
class AuthorsDSnoT(DSnoT):
    """Exchanges weights as the authors' code does, on top of its uniform sparsity."""

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        return AuthorsUniform().allocate(evaluator, sparsity)

    def around(self, saliency: Saliency) -> AuthorsDSnoTRefinement:
        return AuthorsDSnoTRefinement(saliency, self.cycles, self.threshold)
