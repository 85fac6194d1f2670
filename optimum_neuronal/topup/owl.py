"""OWL: blocks with many outlying weights are pruned less."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ..common.validation import hyper
from ..model.projections import Block
from ..trials import Trials
from ..trials.block_scores import ActivationScores
from .base import BASELINE_VARIANTS, Allocation, TopUp, register_topup, wanda_metric
from .neuronal_authors import spread


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
        variant (`str`): `"authors"`, their code as it was run: docs/methods.md says what differs.
    """

    paper: ClassVar[str] = "Yin et al., Outlier Weighed Layerwise Sparsity (OWL), ICML 2024"

    outlier_factor: float = hyper(5.0, 0, above=True)
    half_width: float = hyper(0.08, 0, 1)
    variant: str = hyper("corrected", choices=BASELINE_VARIANTS)

    def forwards(self, decoder, saliency, aligned, samples) -> int:
        return samples * len(decoder.blocks)

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        score = partial(outlier_ratio, factor=self.outlier_factor)
        ratios = trials.measure(
            ActivationScores(f"counting outliers above {self.outlier_factor:g} means (OWL)", score)
        )
        values = torch.tensor(ratios, dtype=torch.float64)
        plan = spread(trials, sparsity, self.half_width, values, self.variant)
        return Allocation(plan, {"owl": {"outlier_ratios": ratios}})


def outlier_ratio(block: Block, activations: dict[str, torch.Tensor], factor: float) -> float:
    """Return the share of a block's prunable weights whose Wanda metric exceeds `factor` times their mean, in [0, 1].

    Projections take turns: the metric of a whole block may not fit in memory beside the model.
    """
    total = sum(wanda_metric(projection, activations).sum().item() for projection in block.pruned)
    threshold = factor * total / block.numel
    outliers = sum((wanda_metric(projection, activations) > threshold).sum().item() for projection in block.pruned)
    return outliers / block.numel
