"""ATP: the sparsity of the blocks is an arithmetic progression."""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..engine.passes import Pass
from ..model.projections import Decoder
from ..sparsity.plan import SparsityPlan
from ..trials.output_errors import OutputPass
from ..trials.sweep import Sweep
from ..validation import check_count
from .base import Allocation, TopUp, register_topup
from .by_block import block_sizes, plan_of_blocks, pruned_blocks
from .choosing import index_of_smallest
from .spreading import LARGEST, SMALLEST, get_dist


LABEL = "ATP"
METRIC = "nll"  # what candidates are compared by


@register_topup("atp")
@dataclass(frozen=True)
class ATP(TopUp):
    """Sparsity rises by `beta` from block to block, since errors of early blocks are amplified by later ones
    (Huang et al., Determining Layer-wise Sparsity for LLMs Through a Theoretical Perspective, ICML 2025).

    `s_l = S - beta (L - 1) / 2 + beta l`. The paper prunes the model with every `beta = 0.002, 0.004, ...` up to the
    largest that keeps sparsities in [0, 1], and keeps the one of the lowest perplexity on WikiText2's test set. Here
    candidates are spread evenly over the betas that keep sparsities in [0.01, 0.99], uniform sparsity being the first,
    and the one of the lowest negative log-likelihood on the alignment sequences is kept.

    Args:
        trials (`int`): how many betas are tried, at least 2. With the 15 of the default and 8 alignment sequences of
            128, the search costs no more than one pass over the calibration set.
    """

    compares_outputs: ClassVar[bool] = True

    trials: int = 15

    def __post_init__(self):
        check_count("trials", self.trials, 2)

    def passes(self) -> tuple[Pass, ...]:
        return (OutputPass(LABEL, self.trials, metric=METRIC),)

    def allocate(self, sweep: Sweep, sparsity: float) -> Allocation:
        start = time.perf_counter()
        betas = beta_grid(len(pruned_blocks(sweep.decoder)), sparsity, self.trials)
        plans = [progression(sweep.decoder, sparsity, beta) for beta in betas]
        if len(plans) == 1:
            return Allocation(plans[0], {"atp": {"beta": 0.0, "candidates": []}})
        errors = sweep.output_errors(plans, METRIC, label=LABEL, reference="dense")
        best = index_of_smallest(errors)
        candidates = [{"beta": beta, "error": error} for beta, error in zip(betas, errors)]
        decision = {"beta": betas[best], "candidates": candidates, "seconds": time.perf_counter() - start}
        return Allocation(plans[best], {"atp": decision})


def beta_grid(blocks: int, sparsity: float, trials: int) -> list[float]:
    """Evenly spaced betas from 0 to the largest that keeps all sparsities in [0.01, 0.99]; 0 alone if there is none.

    Args:
        blocks (`int`): the paper's L.
        sparsity (`float`): the paper's S, in [0, 1).
        trials (`int`): how many betas are wanted, at least 2.
    """
    room = min(sparsity - SMALLEST, LARGEST - sparsity)
    if blocks < 2 or room <= 0:
        return [0.0]
    largest = 2 * room / (blocks - 1)
    return [largest * step / (trials - 1) for step in range(trials)]


def progression(decoder: Decoder, sparsity: float, beta: float) -> SparsityPlan:
    """The plan whose sparsity rises by `beta` from block to block and hits the target, whatever the blocks' sizes."""
    blocks = pruned_blocks(decoder)
    half_width = beta * (len(blocks) - 1) / 2
    from_last = torch.arange(len(blocks), 0, -1)  # large values are spared: the first blocks
    return plan_of_blocks(blocks, get_dist(sparsity, half_width, from_last, block_sizes(blocks)))
