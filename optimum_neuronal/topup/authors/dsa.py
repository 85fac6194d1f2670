"""DSA as in the authors' code."""

from dataclasses import dataclass

import numpy as np

from ...saliency.plan import Plan
from ...trials import PlanEvaluator
from ..base import register_topup
from ..distribution import plan_of_blocks, pruned_blocks
from ..dsa import DSA, Function, Statistics
from .plans import distribute, rounded


HALF_WIDTH = 0.08


@register_topup("dsa", variant="authors")
@dataclass(frozen=True)
class AuthorsDSA(DSA):
    """Ignores a function's own half-width. An infinite importance counts as -1 and does not rule the function out."""

    def plan(self, evaluator: PlanEvaluator, sparsity: float, function: Function, statistics: Statistics) -> Plan:
        importances = function.importances(statistics).numpy()
        importances = np.where(np.isinf(importances), -1, importances)
        scaled = (importances - importances.min()) / (np.ptp(importances) or 1)
        return rounded(
            evaluator, plan_of_blocks(pruned_blocks(evaluator.decoder), distribute(1 - scaled, sparsity, HALF_WIDTH))
        )
