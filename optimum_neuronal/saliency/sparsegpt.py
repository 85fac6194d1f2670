"""SparseGPT: prunes column by column, and compensates for every pruned weight in later columns."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..blocks.statistics import Hessian, SquaredNorms, wide_dtype
from ..common.torch_state import full_precision
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
    solves_alike: ClassVar[bool] = True

    block_size: int = hyper(128, 1)
    dampening: float = hyper(0.01, 0, 1, above=True)

    @full_precision()
    def solve(self, weights, hessian, sparsities, pattern=None):
        dead = hessian.diagonal() == 0  # inputs that are always zero: pruned first
        inverse = solve_dampened(hessian, self.dampening, ", ".join(weights), self._factor)
        rows = [len(weight) for weight in weights.values()]
        stacked = torch.cat(list(weights.values()))
        parts = dict(zip(weights, stacked.split(rows)))
        group = pattern.group if pattern else 1
        size = max(group, self.block_size // group * group)
        for start in range(0, len(inverse), size):
            end = min(start + size, len(inverse))
            block, factor = stacked[:, start:end].contiguous(), inverse[start:end, start:end].contiguous()
            scale = factor.diagonal().masked_fill(dead[start:end], math.inf)
            mask = None
            if pattern is None:
                counts = [self._count(len(part), start, end, float(sparsities[name])) for name, part in parts.items()]
                mask = torch.cat(list(map(mask_whole, (block / scale).square().split(rows), counts)))
            errors = prune_block(block, factor, scale, mask, pattern)
            stacked[:, start:end] = block
            # The rounding of a product depends on the number of rows and on addresses: each projection has its own.
            for part, own in zip(parts.values(), errors.split(rows)):
                part[:, end:] -= own.clone() @ inverse[start:end, end:]
        return parts

    def _factor(self, matrix: torch.Tensor) -> torch.Tensor | None:
        return inverse_factor(matrix)

    def _count(self, rows: int, start: int, end: int, sparsity: float) -> int:
        """Return how many weights to prune in columns `start` to `end`."""
        # Remainders are carried from block to block, so that the whole weight hits its target.
        return int(rows * end * sparsity + 1e-4) - int(rows * start * sparsity + 1e-4)


def prune_block(
    weight: torch.Tensor,
    inverse: torch.Tensor,
    scale: torch.Tensor,
    mask: torch.Tensor | None,
    pattern: ColumnPattern | None = None,
) -> torch.Tensor:
    """Prune and update a few columns, (out, columns), in place. Return their errors, for which later columns compensate.

    Args:
        weight (`Tensor` of float32, shape (out, columns)): the columns.
        inverse (`Tensor` of float32, shape (columns, columns)): their part of the factor of the Hessian's inverse.
        scale (`Tensor` of float32, shape (columns,)): its diagonal, infinite for inputs that are always zero.
        mask (`Tensor` of bool, shape (out, columns), *optional*): True where a weight is kept, unless there is a `pattern`.
        pattern ([`ColumnPattern`], *optional*): N:M pattern to prune by instead.
    """
    columns = weight.T.contiguous()  # rows of a contiguous tensor are fast to update
    errors = torch.empty_like(columns)
    # All bits of an integer are set where a weight is pruned. Its bits are faster to select with than a condition.
    pruned = torch.empty_like(columns, dtype=torch.int32) if mask is None else mask.T.int() - 1
    column_bits, error_bits = columns.view(torch.int32), errors.view(torch.int32)
    rows = zip(column_bits, pruned, errors, error_bits, scale, inverse.unsqueeze(2))
    for index, (bits, chosen, error, chosen_bits, divisor, factors) in enumerate(rows):
        if pattern and index % pattern.group == 0:
            group = slice(index, index + pattern.group)
            pruned[group] = mask_groups((columns[group].T / scale[group]).square(), pattern).T.int() - 1
        torch.bitwise_and(bits, chosen, out=chosen_bits)
        error.div_(divisor)
        columns[index + 1 :].sub_(factors[index + 1 :] * error)
    column_bits.bitwise_and_(~pruned)
    weight.copy_(columns.T.contiguous())
    return errors.T.contiguous()


def inverse_factor(matrix: torch.Tensor) -> torch.Tensor | None:
    """Return the upper Cholesky factor U of the inverse, `U^T U`, in float32. Return None if the inversion fails.

    The computation is in float64: errors of float32 differ between processors and would change the masks.
    """
    # With rows and columns in reverse order, U^-1 is the lower factor, so the inverse itself is not needed.
    factor, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1).to(wide_dtype(matrix.device)))
    if bool(failed):
        return None
    # Transposed, it has the layout of the factor and is not copied.
    inverse = torch.eye(len(matrix), dtype=factor.dtype, device=factor.device).T
    torch.linalg.solve_triangular(factor, inverse, upper=False, out=inverse)
    inverse = inverse.to(matrix.dtype).flip(0, 1)
    return inverse if bool(torch.isfinite(inverse).all()) else None


class DecayingHessian(Hessian):
    """A Hessian whose squared norms weight the n-th sequence by `1 / n`.

    The Hessian itself weights all sequences equally: it is twice the mean of their `x x^T`.
    """

    def __init__(self):
        super().__init__()
        self._sequences = 0

    def _add_products(self, inputs: torch.Tensor) -> None:
        if self.hessian is None:
            self.hessian = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1])
        self._sequences += 1
        inputs = math.sqrt(2 / self._sequences) * inputs
        with full_precision():
            # Added to the rest as a product of its own, which rounds as in their code.
            self.hessian.mul_((self._sequences - 1) / self._sequences).add_(inputs.T @ inputs)

    @property
    def value(self) -> torch.Tensor:
        squares = super().value
        return squares / torch.arange(1, len(squares) + 1, device=squares.device)[:, None]


@register_saliency("sparsegpt", variant="authors")
@dataclass(frozen=True)
class AuthorsSparseGPT(SparseGPT):
    """SparseGPT as it was run for the paper on NeuronAL.

    - Inverts and factorizes the Hessian in float32, and in float64 only where that fails.
    - Prunes one weight more than the target in every block of columns.
    - Prunes all weights of inputs that are always zero, beyond the target too. These count as one in the mean diagonal
      of which dampening is a share.
    - Activations weight the n-th sequence by `1 / n`. Allocation, as in NeuronAL's block step, and a refit read them.
    """

    statistic: ClassVar[type[SquaredNorms]] = DecayingHessian

    def solve(self, weights, hessian, sparsities, pattern=None):
        dead = hessian.diagonal() == 0
        weights = {name: torch.where(dead, 0, weight) for name, weight in weights.items()}
        return super().solve(weights, hessian + dead.to(hessian.dtype).diag(), sparsities, pattern)

    def _count(self, rows: int, start: int, end: int, sparsity: float) -> int:
        return int(rows * (end - start) * sparsity) + 1

    def _factor(self, matrix: torch.Tensor) -> torch.Tensor | None:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not bool(failed):
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        return factor if not bool(failed) and bool(torch.isfinite(factor).all()) else super()._factor(matrix)
