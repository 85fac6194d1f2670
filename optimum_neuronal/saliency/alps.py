"""ALPS: finds the weights to keep by ADMM, then fits them to the dense outputs of the projection."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..common.machine import full_precision
from ..common.validation import hyper
from ..packed.change import Change, NewWeight
from .admm import Support, Unstructured, find_support, fit_support
from .base import DampenedHessian, WeightUpdate, register_saliency
from .plan import ColumnPattern, mask_groups, mask_rows, row_counts


QUICK = 60  # iterations at most in trials


@register_saliency("alps")
@dataclass(frozen=True)
class ALPS(WeightUpdate):
    """Sparse least squares (Meng et al., ALPS, 2024): `min ||(W - V) X||^2` over all V with a given number of nonzeros.

    Args:
        iterations (`int`): ADMM iterations at most. It stops earlier when the support has settled.
        refinements (`int`): steps of conjugate gradients that fit the kept weights.
        dampening (`float`): share of the Hessian's mean diagonal to add to its diagonal.
    """

    knows_rows: ClassVar[bool] = True
    reconstruct: ClassVar[str] = "dense"

    iterations: int = hyper(300, 1)
    refinements: int = hyper(10, 0)
    dampening: float = hyper(0.01, 0, 1, above=True)

    def prune(self, weight, hessian, sparsity, pattern=None, name="the weight"):
        return self.prune_together({name: weight}, hessian, {name: sparsity}, pattern)[name]

    def solve(self, weights, hessian, amounts, dtype, pattern=None, shared=False) -> dict[str, Change]:
        sparse = self.prune_together(weights, hessian, amounts, pattern)
        return {name: NewWeight(weight.to(dtype)) for name, weight in sparse.items()}

    def prune_together(self, weights, hessian, sparsities, pattern=None) -> dict[str, torch.Tensor]:
        """Return the sparse weights of projections with the same input, by name. Each has its own sparsity."""
        rows = [len(weight) for weight in weights.values()]
        supports = [make_support(weight.shape, sparsities[name], pattern) for name, weight in weights.items()]

        def stacked(values: torch.Tensor, exactly: bool) -> torch.Tensor:
            return torch.cat([support(own, exactly) for support, own in zip(supports, values.split(rows))])

        solved = self._solve(torch.cat(list(weights.values())), hessian, stacked, ", ".join(weights))
        return dict(zip(weights, solved.split(rows)))

    def quick(self) -> "ALPS":
        return replace(self, iterations=min(self.iterations, QUICK))

    def _solve(self, weight: torch.Tensor, hessian: torch.Tensor, support: Support, name: str) -> torch.Tensor:
        dampened = DampenedHessian(hessian, self.dampening, name)

        def attempt(matrix: torch.Tensor) -> torch.Tensor | None:
            # With a diagonal of ones, a weight's size is the cost of pruning it, and one penalty suits all inputs.
            scale = matrix.diagonal().sqrt()
            matrix = matrix / scale / scale[:, None]
            start = (weight * scale).masked_fill(dampened.dead, 0)  # weights of dead inputs are pruned first
            target = start @ matrix
            try:
                found = find_support(matrix, target, start, support, range(1, self.iterations + 1))
            except torch.linalg.LinAlgError:
                return None
            return fit_support(matrix, target, found, support(found, True), self.refinements).div_(scale)

        with full_precision():
            return dampened.solve(attempt)


def make_support(shape: tuple[int, int], sparsity: float | torch.Tensor, pattern: ColumnPattern | None) -> Support:
    if pattern is not None:
        return lambda values, exactly: mask_groups(values.abs(), pattern)
    if isinstance(sparsity, torch.Tensor) and sparsity.ndim:
        pruned = row_counts(sparsity, shape)
        return lambda values, exactly: mask_rows(values.abs(), pruned)
    return Unstructured(shape[0] * shape[1] - int(shape[0] * shape[1] * float(sparsity) + 1e-4))
