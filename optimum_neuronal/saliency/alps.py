"""ALPS: finds the weights to keep by ADMM, then fits them to the dense outputs of the projection.

Weights, targets and masks have shape (out, in). The Hessian has shape (in, in).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.torch_state import full_precision
from ..common.validation import hyper
from .base import WeightUpdate, register_saliency, solve_dampened
from .plan import ColumnPattern, mask_groups, mask_rows, mask_whole, on_cpu, pruned_count, smallest


RHO = 0.1  # initial penalty, for a Hessian whose diagonal is 1
PERIOD = 3  # iterations between two checks of how much the support still changes
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # changed share of the support -> factor for the penalty
SETTLED, SETTLED_AFTER = 3e-4, 30  # stop below this changed share, after this many iterations
NARROW = 0.05  # half-width of the window around the last threshold in which the next one is sought
SMALL = 2**16  # weights below which the window costs more than it saves

# Values, `exactly` -> the mask of the largest sizes. Ties may exceed the count unless `exactly` is True.
Support = Callable[[torch.Tensor, bool], torch.Tensor]


@register_saliency("alps")
@dataclass(frozen=True)
class ALPS(WeightUpdate):
    """Sparse least squares (Meng et al., ALPS, 2024): `min ||(W - V) X||^2` over all V with a given number of nonzeros.

    Args:
        iterations (`int`): ADMM iterations at most. It stops earlier when the support has settled.
        refinements (`int`): steps of conjugate gradients that fit the kept weights.
        dampening (`float`): share of the Hessian's mean diagonal to add to its diagonal.
    """

    paper: ClassVar[str] = (
        "Meng et al., ALPS: Improved Optimization for Highly Sparse One-Shot Pruning for LLMs, NeurIPS 2024"
    )
    summary: ClassVar[str] = "ALPS chose the weights, and gave those that are left new values."

    iterations: int = hyper(300, 1)
    refinements: int = hyper(10, 0)
    dampening: float = hyper(0.01, 0, 1, above=True)

    def solve(self, weights, hessian, sparsities, pattern=None):
        rows, weight = [len(weight) for weight in weights.values()], torch.cat(list(weights.values()))
        supports = [make_support(weight, sparsities[name], pattern) for name, weight in weights.items()]
        dead = hessian.diagonal() == 0  # inputs that are always zero: pruned first, and otherwise left as they are

        def support(values: torch.Tensor, exactly: bool) -> torch.Tensor:
            return torch.cat([own(part, exactly) for own, part in zip(supports, values.split(rows))])

        def attempt(matrix: torch.Tensor) -> torch.Tensor | None:
            # With a diagonal of ones, a weight's size is the cost of pruning it, and one penalty suits all inputs.
            scale = matrix.diagonal().sqrt()
            matrix = matrix / scale / scale[:, None]
            start = (weight * scale).masked_fill(dead, 0)
            target = start @ matrix
            try:
                dense = find_support(matrix, target, start, support, self.iterations)
            except torch.linalg.LinAlgError:
                return None
            mask = support(dense, True)
            fitted = fit_support(matrix, target, dense, mask, self.refinements).div_(scale)
            return torch.where(mask & dead, weight, fitted)

        with full_precision():
            solved = solve_dampened(hessian, self.dampening, ", ".join(weights), attempt)
        return dict(zip(weights, solved.split(rows)))


def make_support(weight: torch.Tensor, sparsity: float | torch.Tensor, pattern: ColumnPattern | None) -> Support:
    if pattern is not None:
        return lambda values, exactly: mask_groups(values.abs(), pattern)
    pruned = pruned_count(sparsity, weight.shape)
    if isinstance(pruned, torch.Tensor):
        counts = pruned.to(weight.device)  # once, since it waits for an accelerator
        return lambda values, exactly: mask_rows(values.abs(), counts)
    return Unstructured(weight.numel() - pruned)


class Unstructured:
    """A support: so many kept weights in the whole matrix."""

    def __init__(self, count: int):
        self.count = count
        self._threshold: float | None = None

    def __call__(self, values: torch.Tensor, exactly: bool) -> torch.Tensor:
        sizes = values.abs()
        if exactly or self.count == 0:
            return mask_whole(sizes, values.numel() - self.count)
        if not on_cpu(sizes):
            return sizes >= smallest(sizes.flatten(), sizes.numel() + 1 - self.count)
        self._threshold = self._find_threshold(sizes.flatten())
        return sizes >= self._threshold

    def _find_threshold(self, sizes: torch.Tensor) -> float:
        """Return the smallest size that is kept. It moves little between iterations, so few sizes need sorting."""
        if self._threshold is not None and len(sizes) >= SMALL:
            low, high = self._threshold * (1 - NARROW), self._threshold * (1 + NARROW)
            inside = sizes[(sizes >= low) & (sizes < high)]
            place = self.count - int(torch.count_nonzero(sizes >= high))
            if 0 < place <= len(inside):
                return smallest(inside, len(inside) + 1 - place).item()
        return smallest(sizes, len(sizes) + 1 - self.count).item()


def invert(matrix: torch.Tensor, rho: float) -> torch.Tensor:
    """Return the inverse of `matrix + rho I`, for a symmetric matrix without negative eigenvalues."""
    shifted = torch.diagonal_scatter(matrix, matrix.diagonal() + rho)
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(shifted, check_errors=True).L)


def find_support(
    matrix: torch.Tensor, target: torch.Tensor, start: torch.Tensor, support: Support, iterations: int
) -> torch.Tensor:
    """Return dense weights of which `support` should keep the largest (ALPS, Algorithm 1).

    `matrix` is the Hessian A with a diagonal of about 1, `target` is `W A`, and `start` is W.

    In the paper's notation, the state is `V = B + U / rho`. Its kept part is D, the rest is `U / rho`. An accelerator is
    waited for once in PERIOD iterations.
    """
    rho, inverse = RHO, None
    mask = support(start, False)
    before, kept = mask, max(1, int(torch.count_nonzero(mask)))
    values = start.masked_fill(~mask, 0)  # V, with U = 0 at first
    right = torch.empty_like(start)
    weight = torch.empty_like(start)
    for iteration in range(1, iterations + 1):
        if inverse is None:
            inverse = invert(matrix, rho)
        torch.where(mask, values, -values, out=right)
        torch.mm(right.mul_(rho).add_(target), inverse, out=weight)
        values.masked_fill_(mask, 0).add_(weight)
        mask = support(values, False)
        if iteration % PERIOD:
            continue
        changed = int(torch.count_nonzero(mask != before)) / kept
        if changed == 0 or (iteration >= SETTLED_AFTER and changed < SETTLED):
            break
        before, grown = mask, rho * next(factor for share, factor in GROWTH if changed >= share)
        values = torch.where(mask, values, values * (rho / grown))
        rho, inverse = grown, None
    return weight


def fit_support(
    matrix: torch.Tensor, target: torch.Tensor, start: torch.Tensor, mask: torch.Tensor, steps: int
) -> torch.Tensor:
    """Return sparse weights V with `V A = target` as nearly as the mask allows, by conjugate gradients row by row."""
    dropped = ~mask
    weight = start.masked_fill(dropped, 0)
    residual = (target - weight @ matrix).masked_fill_(dropped, 0)
    direction = residual.clone()
    square = residual.square().sum(dim=1, keepdim=True)
    for _ in range(steps):
        moved = (direction @ matrix).masked_fill_(dropped, 0)
        curvature = (direction * moved).sum(dim=1, keepdim=True)
        length = torch.where(curvature > 0, square / curvature, 0)
        weight.addcmul_(direction, length)
        residual.addcmul_(moved, -length)
        again = residual.square().sum(dim=1, keepdim=True)
        direction.mul_(torch.where(square > 0, again / square, 0)).add_(residual)
        square = again
    return weight
