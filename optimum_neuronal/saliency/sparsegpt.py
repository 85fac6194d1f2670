"""SparseGPT: prunes column by column, and compensates for every pruned weight in later columns."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..blocks.statistics import wide_dtype
from ..common.validation import hyper
from .base import WeightUpdate, register_saliency, solve_dampened
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
    summary: ClassVar[str] = "SparseGPT chose the weights, and gave those that are left new values."
    knows_rows: ClassVar[bool] = False

    block_size: int = hyper(128, 1)
    dampening: float = hyper(0.01, 0, 1, above=True)

    def solve(self, weights, hessian, sparsities, pattern=None):
        dead = hessian.diagonal() == 0  # inputs that are always zero: pruned first
        inverse = solve_dampened(hessian, self.dampening, ", ".join(weights), inverse_factor)
        return {name: self._prune(w, inverse, dead, sparsities[name], pattern) for name, w in weights.items()}

    def _prune(
        self,
        weight: torch.Tensor,
        inverse: torch.Tensor,
        dead: torch.Tensor,
        sparsity: float,
        pattern: ColumnPattern | None,
    ) -> torch.Tensor:
        """Return the sparse weight, (out, in). `inverse` is the factor of the Hessian's inverse, (in, in)."""
        weight = weight.clone()
        group = pattern.group if pattern else 1
        size = max(group, self.block_size // group * group)
        for start in range(0, weight.shape[1], size):
            end = min(start + size, weight.shape[1])
            count = self._count(weight.shape[0], start, end, float(sparsity))
            errors = self._prune_block(
                weight[:, start:end], inverse[start:end, start:end], dead[start:end], count, pattern
            )
            weight[:, end:] -= errors @ inverse[start:end, end:]
        return weight

    def _count(self, rows: int, start: int, end: int, sparsity: float) -> int:
        """Return how many weights to prune in columns `start` to `end`."""
        # Remainders are carried from block to block, so that the whole weight hits its target.
        return int(rows * end * sparsity + 1e-4) - int(rows * start * sparsity + 1e-4)

    def _prune_block(
        self,
        weight: torch.Tensor,
        inverse: torch.Tensor,
        dead: torch.Tensor,
        count: int,
        pattern: ColumnPattern | None,
    ) -> torch.Tensor:
        """Prune and update a few columns in place. Return their errors, for which later columns compensate."""
        scale = inverse.diagonal().masked_fill(dead, math.inf)
        columns = weight.T.contiguous()  # rows of a contiguous tensor are fast to update
        mask = torch.ones_like(weight, dtype=torch.bool) if pattern else mask_whole((weight / scale).square(), count)
        errors, mask = torch.empty_like(columns), mask.T.contiguous()
        for index in range(len(columns)):
            if pattern and index % pattern.group == 0:
                group = slice(index, index + pattern.group)
                mask[group] = mask_groups((columns[group].T / scale[group]).square(), pattern).T
            kept = torch.where(mask[index], columns[index], 0)
            errors[index] = (columns[index] - kept) / scale[index]
            columns[index:] -= torch.outer(inverse[index, index:], errors[index])
            columns[index] = kept
        weight.copy_(columns.T)
        return errors.T.contiguous()


def inverse_factor(matrix: torch.Tensor) -> torch.Tensor | None:
    """Return the upper Cholesky factor U of the inverse, `U^T U`, in float32. Return None if the inversion fails.

    The computation is in float64: errors of float32 differ between processors and would change the masks.
    """
    # With rows and columns in reverse order, U^-1 is the lower factor, so the inverse itself is not needed.
    factor, failed = torch.linalg.cholesky_ex(matrix.to(wide_dtype(matrix.device)).flip(0, 1))
    if bool(failed):
        return None
    identity = torch.eye(len(matrix), dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False).flip(0, 1).to(matrix.dtype)
    return inverse if bool(torch.isfinite(inverse).all()) else None
