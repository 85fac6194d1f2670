"""OWL as in the authors' code."""

from dataclasses import dataclass

import torch

from ...saliency.plan import Plan
from ...trials import PlanEvaluator
from ..base import register_topup
from ..distribution import authors_dist, authors_rounding, plan_of_blocks, pruned_blocks
from ..owl import OWL


@register_topup("owl", variant="authors")
@dataclass(frozen=True)
class AuthorsOWL(OWL):
    """Clips sparsities without keeping their mean, and rounds them down to whole weights of a row."""

    def plan(self, evaluator: PlanEvaluator, sparsity: float, ratios: torch.Tensor) -> Plan:
        sparsities = authors_dist(
            100 * ratios.numpy(), sparsity, self.half_width
        )  # in percent, which rounds differently
        return authors_rounding(evaluator, plan_of_blocks(pruned_blocks(evaluator.decoder), sparsities))
