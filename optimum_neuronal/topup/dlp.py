"""DLP: blocks whose median weight has a low saliency are pruned more."""

from dataclasses import dataclass

import torch

from ..common.validation import hyper
from ..model.projections import Block, Decoder
from ..saliency import Saliency
from ..trials import Trials
from .base import Allocation, TopUp, block_scores, pruned_blocks, register_topup, spread_over_blocks, wanda_metric


HALF = 2**15  # values of the upper 16 bits of a non-negative float32; the lower 16 have twice as many


@register_topup("dlp")
@dataclass(frozen=True)
class DLP(TopUp):
    """Dynamic Layerwise Pruning (Chen et al., DLP, ICML 2025).

    A block's importance is `1 - U / sum of U`, with U the median of the Wanda metric `|W_ij| a_j` over its weights in
    the dense model. It decides sparsity linearly, in a window of `2 alpha`.

    Args:
        half_width (`float`): the paper's alpha, in [0, 1]: half the width of the window of sparsities.
    """

    half_width: float = hyper(0.15, 0, 1)

    def forwards(self, decoder: Decoder, saliency: Saliency, aligned: int, samples: int) -> int:
        return samples * len(decoder.blocks)

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        medians = block_scores(trials, median_metric, "DLP medians")
        # -U has the order and the proportions of the relative importance; nothing else counts.
        plan = spread_over_blocks(pruned_blocks(trials.decoder), sparsity, self.half_width, -medians)
        return Allocation(plan, {"dlp": {"medians": medians.tolist()}})


def median_metric(block: Block, activations: dict[str, torch.Tensor]) -> float:
    """Return the lower median of the Wanda metric of a block's prunable weights.

    Non-negative floats have the order of their bits. Counting finds the upper bits, then the lower ones, without a copy
    of the whole block's metric.
    """

    def bits(projection) -> torch.Tensor:
        return wanda_metric(projection, activations).flatten().view(torch.int32)

    upper = sum(torch.bincount(bits(projection) >> 16, minlength=HALF).cpu() for projection in block.pruned)
    rank = (int(upper.sum()) - 1) // 2
    high, rank = _position(upper, rank)
    lower = torch.zeros(2 * HALF, dtype=torch.int64)
    for projection in block.pruned:
        values = bits(projection)
        among = values[(values >> 16) == high] & (2 * HALF - 1)
        lower += torch.bincount(among, minlength=2 * HALF).cpu()
    low, _ = _position(lower, rank)
    return torch.tensor((high << 16) | low, dtype=torch.int32).view(torch.float32).item()


def _position(counts: torch.Tensor, rank: int) -> tuple[int, int]:
    """Return the bin that holds the value of a rank, counted from 0, and the value's rank in the bin."""
    ends = counts.cumsum(dim=0)
    found = int((ends <= rank).sum())
    return found, rank - int(ends[found] - counts[found])
