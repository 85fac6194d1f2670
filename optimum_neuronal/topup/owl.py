"""OWL: the more outliers a block has, the less it is pruned."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ..common.validation import hyper
from ..model.projections import Block
from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from ..trials.scores import BlockScores
from .base import Allocation, TopUp, register_topup
from .distribution import authors_dist, authors_rounding, distribute_over_blocks, plan_of_blocks, wanda_metric


@register_topup("owl")
@dataclass(frozen=True)
class OWL(TopUp):
    """Outlier Weighed Layerwise sparsity (Yin et al., OWL, ICML 2024).

    A weight is an outlier if its Wanda metric `|W_ij| a_j` exceeds M times the mean metric of its block, as in the
    authors' code. A block's share of outliers in the dense model decides its sparsity linearly, in a window of
    `2 lambda`.

    Args:
        outlier_factor (`float`): the paper's M, above 0: how many times the mean an outlier exceeds.
        half_width (`float`): the paper's lambda, in [0, 1]: half the width of the window of sparsities.
    """

    paper: ClassVar[str] = "Yin et al., Outlier Weighed Layerwise Sparsity (OWL), ICML 2024"

    outlier_factor: float = hyper(5.0, 0, above=True)
    half_width: float = hyper(0.08, 0, 1)

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        score = partial(outlier_ratio, factor=self.outlier_factor)
        label = f"counting weights above {self.outlier_factor:g} times the mean (OWL)"
        ratios = evaluator.measure_once(BlockScores(label, score))
        plan = self.plan(evaluator, sparsity, torch.tensor(ratios, dtype=torch.float64))
        return Allocation(plan, {"owl": {"outlier_ratios": ratios}})

    def plan(self, evaluator: PlanEvaluator, sparsity: float, ratios: torch.Tensor) -> Plan:
        """Return the plan that prunes blocks less the more outliers they have; ratios: float64, shape (blocks,)."""
        return distribute_over_blocks(evaluator.decoder, sparsity, self.half_width, ratios)


def outlier_ratio(block: Block, activations: dict[str, torch.Tensor], factor: float) -> float:
    """Return the share of a block's prunable weights whose Wanda metric exceeds `factor` times their mean, in [0, 1].

    Projections take turns: the metric of a whole block may not fit in memory beside the model.
    """
    total = sum(wanda_metric(projection, activations).sum().item() for projection in block.pruned)
    threshold = factor * total / block.numel
    outliers = sum((wanda_metric(projection, activations) > threshold).sum().item() for projection in block.pruned)
    return outliers / block.numel


@register_topup("owl", variant="authors")
@dataclass(frozen=True)
class AuthorsOWL(OWL):
    """As in the authors' code: clips sparsities without keeping their mean, and rounds them down to whole weights of a row."""

    def plan(self, evaluator: PlanEvaluator, sparsity: float, ratios: torch.Tensor) -> Plan:
        # In percent, which rounds differently.
        sparsities = authors_dist(100 * ratios.numpy(), sparsity, self.half_width)
        return authors_rounding(evaluator, plan_of_blocks(evaluator.decoder, sparsities))
