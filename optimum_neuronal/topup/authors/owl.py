"""OWL as in the authors' code."""

from dataclasses import dataclass

import torch

from ...saliency.plan import Plan
from ...trials import Trials
from ..base import register_topup
from ..owl import OWL
from ..spread import plan_of_blocks, pruned_blocks
from .plans import rounded, spread


@register_topup("owl", variant="authors")
@dataclass(frozen=True)
class AuthorsOWL(OWL):
    """Clips sparsities without keeping their mean, and rounds them down to whole weights of a row."""

    def plan(self, trials: Trials, sparsity: float, ratios: torch.Tensor) -> Plan:
        sparsities = spread(100 * ratios.numpy(), sparsity, self.half_width)  # in percent, which rounds differently
        return rounded(trials, plan_of_blocks(pruned_blocks(trials.decoder), sparsities))
