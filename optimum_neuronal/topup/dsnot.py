"""DSnoT: uniform sparsity, with masks in which pruned weights are exchanged for kept ones."""

from dataclasses import dataclass
from typing import ClassVar

from ..common.validation import hyper
from ..saliency import Saliency
from ..saliency.dsnot import DSnoTRefinement
from .base import register_topup
from .uniform import Uniform


@register_topup("dsnot")
@dataclass(frozen=True)
class DSnoT(Uniform):
    """Dynamic Sparse no Training (Zhang et al., DSnoT, ICLR 2024), on top of uniform sparsity.

    The masks come from [`DSnoTRefinement`], around the saliency of the prune.

    Args:
        cycles (`int`): the paper's T: weights that a row exchanges at most.
        threshold (`float`): the paper's epsilon, at least 0: rows whose mean output shifts by less are left alone.
    """

    paper: ClassVar[str] = (
        "Zhang et al., Dynamic Sparse No Training: Training-Free Fine-tuning for Sparse LLMs, ICLR 2024"
    )
    decides: ClassVar[bool] = True  # an exchange would break an N:M pattern
    needs_fixed_weights: ClassVar[bool] = True  # an exchange would undo an update's compensation

    cycles: int = hyper(50, 0)
    threshold: float = hyper(0.1, 0)

    def around(self, saliency: Saliency) -> DSnoTRefinement:
        """Return the saliency whose masks the prune takes."""
        return DSnoTRefinement(saliency, self.cycles, self.threshold)
