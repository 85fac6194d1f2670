"""ATP: the sparsity of the blocks is an arithmetic progression."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.validation import hyper
from ..model.projections import Decoder
from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from ..trials.output_errors import OutputErrors
from .base import Allocation, TopUp, register_topup
from .distribution import LEAST_SPARSITY, MOST_SPARSITY, distribute_over_blocks, pruned_blocks


@register_topup("atp")
@dataclass(frozen=True)
class ATP(TopUp):
    """Arithmetic progression of sparsities, since later blocks amplify the errors of early ones.

    `s_l = S - beta (L - 1) / 2 + beta l` (Huang et al., Determining Layer-wise Sparsity for LLMs Through a Theoretical
    Perspective, ICML 2025). Candidates are spread evenly over the betas that keep sparsities in [0.01, 0.99]. The beta
    with the lowest negative log-likelihood on the alignment sequences wins.

    Args:
        candidates (`int`): how many betas are tried, at least 2. With the default of 15 and 8 of 128 sequences for
            alignment, the search costs no more than one pass over the calibration set.
    """

    paper: ClassVar[str] = (
        "Huang et al., Determining Layer-wise Sparsity for Large Language Models Through a Theoretical Perspective, 2025"
    )
    compares_outputs: ClassVar[bool] = True

    candidates: int = hyper(15, 2)

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        betas = beta_grid(len(pruned_blocks(evaluator.decoder)), sparsity, self.candidates)
        plans = [progression(evaluator.decoder, sparsity, beta) for beta in betas]
        if len(plans) == 1:
            return Allocation(plans[0], {"atp": {"beta": 0.0, "candidates": []}})
        errors = evaluator.measure(OutputErrors("nll", "comparing sparsities by block (ATP)"), plans)
        best = errors.index(min(errors))
        candidates = [{"beta": beta, "error": error} for beta, error in zip(betas, errors)]
        return Allocation(plans[best], {"atp": {"beta": betas[best], "candidates": candidates}})


def beta_grid(blocks: int, sparsity: float, candidates: int) -> list[float]:
    """Return evenly spaced betas from 0 to the largest that keeps sparsities in [0.01, 0.99]; without one, only 0."""
    margin = min(sparsity - LEAST_SPARSITY, MOST_SPARSITY - sparsity)
    if blocks < 2 or margin <= 0:
        return [0.0]
    largest = 2 * margin / (blocks - 1)
    return [largest * step / (candidates - 1) for step in range(candidates)]


def progression(decoder: Decoder, sparsity: float, beta: float) -> Plan:
    """Return the plan whose sparsity rises by `beta` from block to block, its mean on target for any block sizes."""
    blocks = len(pruned_blocks(decoder))
    from_last = torch.arange(blocks, 0, -1)  # large values are pruned less: the first blocks
    return distribute_over_blocks(decoder, sparsity, beta * (blocks - 1) / 2, from_last)
