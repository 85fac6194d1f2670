"""BESA as in the authors' code."""

from dataclasses import dataclass

import torch

from ...model.projections import Block, Projection
from ...saliency.plan import Plan
from ...trials import PlanEvaluator
from ..base import register_topup
from ..besa import BESA, LearnedRate
from .plans import rounded


class BoundedRate(LearnedRate):
    """A softmax of sigmoids of the logits. Its mean starts at 0.5 and stays within 0.38 to 0.62."""

    def _start(self, rates: torch.Tensor, sparsity: float) -> torch.Tensor:
        return torch.zeros_like(rates)

    @property
    def _distribution(self) -> torch.Tensor:
        return self.logits.sigmoid().softmax(dim=0)


@register_topup("besa", variant="authors")
@dataclass(frozen=True)
class AuthorsBESA(BESA):
    """Learns from bounded rates, and does not shift what it learned to the target."""

    def rate(self, projection: Projection, score: torch.Tensor, sparsity: float) -> LearnedRate:
        return BoundedRate(projection, score, sparsity, self.candidate_step)

    def plan(self, evaluator: PlanEvaluator, block: Block, learned: torch.Tensor, sparsity: float) -> Plan:
        return rounded(evaluator, Plan(dict(zip(block.pruned_names, learned.tolist()))))
