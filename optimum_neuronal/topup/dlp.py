"""DLP: the smaller the median metric of a block, the more it is pruned."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.validation import hyper
from ..model.projections import Block
from ..trials import PlanEvaluator
from ..trials.scores import BlockScores
from .base import Allocation, TopUp, register_topup
from .distribution import distribute_over_blocks, wanda_metric


@register_topup("dlp")
@dataclass(frozen=True)
class DLP(TopUp):
    """Dynamic Layerwise Pruning (Chen et al., DLP, ICML 2025).

    A block's importance is `1 - U / sum of U`, with U the median of the Wanda metric `|W_ij| a_j` over its weights in
    the dense model. It decides sparsity linearly, in a window of `2 alpha`.

    Args:
        half_width (`float`): the paper's alpha, in [0, 1]: half the width of the window of sparsities.
    """

    paper: ClassVar[str] = "Chen et al., DLP: Dynamic Layerwise Pruning in Large Language Models, ICML 2025"

    half_width: float = hyper(0.15, 0, 1)

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        medians = evaluator.measure_once(BlockScores("measuring medians of blocks (DLP)", median_metric))
        # -U has the order and the proportions of the relative importance; nothing else matters.
        importance = -torch.tensor(medians, dtype=torch.float64)
        plan = distribute_over_blocks(evaluator.decoder, sparsity, self.half_width, importance)
        return Allocation(plan, {"dlp": {"medians": medians}})


def median_metric(block: Block, activations: dict[str, torch.Tensor]) -> float:
    """Return the lower median of the Wanda metric of a block's prunable weights."""
    # On the CPU: the values take twice the memory of a block's weights in 16 bits.
    return (
        torch.cat([wanda_metric(projection, activations).flatten().cpu() for projection in block.pruned])
        .median()
        .item()
    )
