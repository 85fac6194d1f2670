"""Sparse least squares: which weights stay, by the alternating direction method of multipliers, and their values.

All matrices of weights have shape (out, in): one row of unknowns for every output, of the same inputs.
"""

from collections.abc import Iterable

import torch

from .supports import Support


RHO = 0.1  # the penalty to begin with, on a Hessian whose diagonal is 1
PERIOD = 3  # iterations between two looks at how much the support still changes
# Share of the kept weights that entered or left -> what the penalty is multiplied by.
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
SETTLED, SETTLED_AFTER = 3e-4, 30  # below this share, after so many iterations, the support has been found


class Inverse:
    """`(A + rho I)^-1`, computed anew only when rho changes.

    Args:
        matrix (`Tensor` of float32, shape (in, in)): A, symmetric and positive definite; not changed.
    """

    def __init__(self, matrix: torch.Tensor):
        self.matrix, self.rho = matrix, 0.0
        self._inverse = matrix

    def at(self, rho: float) -> torch.Tensor:
        """The inverse for a penalty above 0, shape (in, in). What was returned before must not be used any more."""
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
    """Weights whose largest, as `support` says, are those that had best stay (ALPS, Algorithm 1).

    With `V = B + U / rho`, of which `D` is the kept part, `U / rho` is the part that is not: so V and a mask are all
    that is carried from one iteration to the next.

    Args:
        inverse ([`Inverse`]): of the Hessian A.
        target (`Tensor` of shape (out, in)): `G = W A`: what `B A` should be.
        start (`Tensor` of shape (out, in)): W; not changed.
        support ([`Support`]): says how many stay, and where.
        iterations (`Iterable[int]`): counts them, from 1; their number is a limit.

    Returns:
        `Tensor`: shape (out, in), dense.
    """
    rho = RHO
    mask = support.kept(start)
    before, kept = mask, max(1, int(torch.count_nonzero(mask)))
    values = start.masked_fill(~mask, 0)  # V: of the part that falls, U / rho is 0 at first
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
    """The values of the weights that stay, by conjugate gradients: every row has a problem of its own.

    Args:
        matrix (`Tensor` of shape (in, in)): the Hessian A, its diagonal being about 1.
        target (`Tensor` of shape (out, in)): what the result times A should be.
        start (`Tensor` of shape (out, in)): where to begin.
        mask (`Tensor`): boolean, shape (out, in), True where weights stay.
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
