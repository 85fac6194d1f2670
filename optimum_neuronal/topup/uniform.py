"""Uniform: one sparsity for every row of every projection."""

from dataclasses import dataclass
from typing import ClassVar

from ..common.validation import hyper
from ..trials import Trials
from .base import BASELINE_VARIANTS, Allocation, TopUp, register_topup, rounded, uniform_plan


@register_topup("uniform")
@dataclass(frozen=True)
class Uniform(TopUp):
    """The baseline of the literature; costs nothing.

    Args:
        variant (`str`): `"authors"`, their code as it was run: `int(in * s)` weights of every row are pruned.
    """

    decides: ClassVar[bool] = False
    uses_calibration: ClassVar[bool] = False

    variant: str = hyper("corrected", choices=BASELINE_VARIANTS)

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        return Allocation(rounded(trials, uniform_plan(trials.decoder, sparsity), self.variant))
