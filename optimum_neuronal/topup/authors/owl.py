"""OWL as in the authors' code."""

from dataclasses import dataclass

import torch

from ...saliency.plan import Plan
from ...trials import Trials
from ..base import register_topup
from ..owl import OWL
from .plans import rounded, spread_over_blocks


@register_topup("owl", variant="authors")
@dataclass(frozen=True)
class AuthorsOWL(OWL):
    """Clips sparsities without keeping their mean, and rounds them down to whole weights of a row."""

    def plan(self, trials: Trials, sparsity: float, ratios: torch.Tensor) -> Plan:
        return rounded(trials, spread_over_blocks(trials.decoder, sparsity, self.half_width, ratios))
