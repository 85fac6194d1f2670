"""SparseGPT: prunes column by column, and compensates for every pruned weight in later columns."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.validation import hyper
from .base import WeightUpdate, inverse_factor, register_saliency, solve_dampened
from .plan import ColumnPattern, mask_groups, mask_whole


@register_saliency("sparsegpt")
@dataclass(frozen=True)
class SparseGPT(WeightUpdate):
    """Optimal brain surgery with one shared inverse Hessian (Frantar and Alistarh, SparseGPT, 2023, Algorithm 1).

    Args:
        block_size (`int`): columns whose mask is chosen together, and whose updates are applied to later columns at once.
        dampening (`float`): share of the Hessian's mean diagonal to add to its diagonal.
    """

    paper: ClassVar[str] = (
        "Frantar and Alistarh, SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot, ICML 2023"
    )
    knows_rows: ClassVar[bool] = False

    block_size: int = hyper(128, 1)
    dampening: float = hyper(0.01, 0, 1, above=True)

    def prune(self, weight, hessian, sparsity, pattern=None, name="the weight"):
        weight = weight.clone()
        weight[:, hessian.diagonal() == 0] = 0  # inputs that are always zero
        inverse = solve_dampened(hessian, self.dampening, name, inverse_factor)
        group = pattern.group if pattern else 1
        size = max(group, self.block_size // group * group)
        pruned = 0
        for start in range(0, weight.shape[1], size):
            end = min(start + size, weight.shape[1])
            # Remainders are carried from block to block, so that the whole weight hits its target.
            count = int(weight.shape[0] * end * float(sparsity) + 1e-4) - pruned
            pruned += count
            errors = self._prune_block(weight[:, start:end], inverse[start:end, start:end], count, pattern)
            weight[:, end:] -= errors @ inverse[start:end, end:]
        return weight

    def _prune_block(
        self, weight: torch.Tensor, inverse: torch.Tensor, count: int, pattern: ColumnPattern | None
    ) -> torch.Tensor:
        """Prune and update a few columns in place. Return their errors, for which later columns compensate."""
        scale, errors = inverse.diagonal(), torch.zeros_like(weight)
        mask = torch.ones_like(weight, dtype=torch.bool) if pattern else mask_whole((weight / scale).square(), count)
        for column in range(weight.shape[1]):
            if pattern and column % pattern.group == 0:
                columns = slice(column, column + pattern.group)
                mask[:, columns] = mask_groups((weight[:, columns] / scale[columns]).square(), pattern)
            kept = torch.where(mask[:, column], weight[:, column], 0)
            errors[:, column] = (weight[:, column] - kept) / scale[column]
            weight[:, column:] -= torch.outer(errors[:, column], inverse[column, column:])
            weight[:, column] = kept
        return errors
