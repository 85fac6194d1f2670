"""Sparse least squares: the support, found by the alternating direction method of multipliers, and its values.

A support says how many weights are kept in the matrix, in every row, or in every group of columns. All matrices of weights
have shape (out, in).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from .masks import ColumnPattern, mask_groups, mask_rows, mask_whole


RHO = 0.1  # the penalty to begin with, on a Hessian whose diagonal is 1
PERIOD = 3  # iterations between two looks at how much the support still changes
# Share of the kept weights that entered or left -> what the penalty is multiplied by.
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
SETTLED, SETTLED_AFTER = 3e-4, 30  # below this share, after so many iterations, the support has been found
NARROW = 0.05  # half-width of the window around the last threshold in which the next one is looked for
SMALL = 2**16  # weights below which the window costs more than it saves


class Support(ABC):
    """A rule for the kept weights of a matrix, by their size."""

    @abstractmethod
    def kept(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mask of the largest absolute values, (out, in). Of equal ones more than allowed may be kept."""

    def exactly(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mask of exactly the allowed number. Of equal values, later rows and columns are kept."""
        return self.kept(values)


class Unstructured(Support):
    """A number of kept weights in the whole matrix."""

    def __init__(self, count: int):
        self.count = count
        self._threshold: float | None = None

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        sizes = values.abs()
        if self.count == 0:
            return torch.zeros_like(sizes, dtype=torch.bool)
        self._threshold = self._find_threshold(sizes.flatten())
        return sizes >= self._threshold

    def exactly(self, values: torch.Tensor) -> torch.Tensor:
        return mask_whole(values.abs(), values.numel() - self.count)

    def _find_threshold(self, sizes: torch.Tensor) -> float:
        """Return the smallest kept size. It moves little between iterations, so most sizes need no sorting."""
        if self._threshold is not None and len(sizes) >= SMALL:
            low, high = self._threshold * (1 - NARROW), self._threshold * (1 + NARROW)
            inside = sizes[(sizes >= low) & (sizes < high)]
            place = self.count - int(torch.count_nonzero(sizes >= high))
            if 0 < place <= len(inside):
                return inside.kthvalue(len(inside) + 1 - place).values.item()
        return sizes.kthvalue(len(sizes) + 1 - self.count).values.item()


class Rowwise(Support):
    """A number of kept weights in every row: int64, shape (out,)."""

    def __init__(self, counts: torch.Tensor):
        self.counts = counts

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        return mask_rows(values.abs(), values.shape[1] - self.counts)


class NofM(Support):
    """The kept weights of an N:M pattern."""

    def __init__(self, pattern: ColumnPattern):
        self.pattern = pattern

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        return mask_groups(values.abs(), self.pattern)


class Stacked(Support):
    """Matrices one below the other, each with its own rule and number of rows."""

    def __init__(self, supports: Sequence[Support], rows: Sequence[int]):
        self.supports, self.rows = supports, list(rows)

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([rule.kept(own) for rule, own in zip(self.supports, values.split(self.rows))])

    def exactly(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([rule.exactly(own) for rule, own in zip(self.supports, values.split(self.rows))])


class Inverse:
    """The inverse `(A + rho I)^-1`, computed anew only when rho changes.

    Args:
        matrix (`Tensor` of float32, shape (in, in)): A, symmetric and positive definite; not changed.
    """

    def __init__(self, matrix: torch.Tensor):
        self.matrix, self.rho = matrix, 0.0
        self._inverse = matrix

    def at(self, rho: float) -> torch.Tensor:
        """Return the inverse for a penalty above 0, shape (in, in). An inverse returned before is no longer valid."""
        if rho != self.rho:
            self._inverse = None  # two of these are never needed at a time
            shifted = self.matrix.clone()
            shifted.diagonal().add_(rho)
            factor = torch.linalg.cholesky_ex(shifted, check_errors=True).L
            del shifted
            self._inverse, self.rho = torch.cholesky_inverse(factor), rho
        return self._inverse


def find_support(
    inverse: Inverse, target: torch.Tensor, start: torch.Tensor, support: Support, iterations: Iterable[int]
) -> torch.Tensor:
    """Return dense weights whose largest, by the rule of `support`, are best kept (ALPS, Algorithm 1), (out, in).

    With `V = B + U / rho`, of which `D` is the kept part, `U / rho` is the other part. So V and a mask are all that one
    iteration hands to the next.

    Args:
        inverse ([`Inverse`]): of the Hessian A.
        target (`Tensor` of shape (out, in)): `G = W A`: what `B A` should be.
        start (`Tensor` of shape (out, in)): W; not changed.
        support ([`Support`]): the rule for kept weights.
        iterations (`Iterable[int]`): numbers from 1, as many as there are iterations at most.
    """
    rho = RHO
    mask = support.kept(start)
    before, kept = mask, max(1, int(torch.count_nonzero(mask)))
    values = start.masked_fill(~mask, 0)  # V: of the pruned part, U / rho is 0 at first
    right = torch.empty_like(start)
    weight = torch.empty_like(start)
    for iteration in iterations:
        torch.where(mask, values, -values, out=right)
        torch.mm(right.mul_(rho).add_(target), inverse.at(rho), out=weight)
        values.masked_fill_(mask, 0).add_(weight)
        mask = support.kept(values)
        if iteration % PERIOD:
            continue
        changed = int(torch.count_nonzero(mask != before)) / kept
        if changed == 0 or (iteration >= SETTLED_AFTER and changed < SETTLED):
            break
        before, grown = mask, rho * next(factor for share, factor in GROWTH if changed >= share)
        values = torch.where(mask, values, values * (rho / grown))
        rho = grown
    return weight


def fit_support(
    matrix: torch.Tensor, target: torch.Tensor, start: torch.Tensor, mask: torch.Tensor, steps: int
) -> torch.Tensor:
    """Return the values of the kept weights by conjugate gradients, for each row by itself.

    Args:
        matrix (`Tensor` of shape (in, in)): the Hessian A, its diagonal being about 1.
        target (`Tensor` of shape (out, in)): what the result times A should be.
        start (`Tensor` of shape (out, in)): where to begin.
        mask (`Tensor`): boolean, shape (out, in), True where kept.
        steps (`int`): of conjugate gradients.

    Returns:
        `Tensor`: shape (out, in), zero where the mask is False.
    """
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
