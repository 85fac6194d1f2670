"""DSA as in the authors' code."""

from dataclasses import dataclass

import torch

from ...saliency.plan import Plan
from ...trials import Trials
from ..base import register_topup
from ..dsa import DSA, Function, Statistics
from .plans import rounded, spread_over_blocks


HALF_WIDTH = 0.08


@register_topup("dsa", variant="authors")
@dataclass(frozen=True)
class AuthorsDSA(DSA):
    """Ignores a function's own half-width. An infinite importance counts as -1 and does not rule the function out."""

    def plan(self, trials: Trials, sparsity: float, function: Function, statistics: Statistics) -> Plan:
        values = -function.importances(statistics)
        values = torch.where(values.isinf(), 1, values)
        return rounded(trials, spread_over_blocks(trials.decoder, sparsity, HALF_WIDTH, values))
