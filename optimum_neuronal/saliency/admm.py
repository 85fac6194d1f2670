"""Sparse least squares by the alternating direction method of multipliers (ADMM): the support, and then its values.

Weights, targets and masks have shape (out, in). The Hessian A has shape (in, in) and a diagonal of about 1.
"""

from collections.abc import Callable, Iterable

import torch

from .plan import mask_whole


RHO = 0.1  # initial penalty, for a Hessian whose diagonal is 1
PERIOD = 3  # iterations between two checks of how much the support still changes
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # changed share of the support -> factor for the penalty
SETTLED, SETTLED_AFTER = 3e-4, 30  # stop below this changed share, after this many iterations
NARROW = 0.05  # half-width of the window around the last threshold in which the next one is sought
SMALL = 2**16  # weights below which the window costs more than it saves

# Values, `exactly` -> the mask of the largest sizes. With ties it may keep more than allowed, unless `exactly`.
Support = Callable[[torch.Tensor, bool], torch.Tensor]


class Unstructured:
    """A support: so many kept weights in the whole matrix."""

    def __init__(self, count: int):
        self.count = count
        self._threshold: float | None = None

    def __call__(self, values: torch.Tensor, exactly: bool) -> torch.Tensor:
        sizes = values.abs()
        if exactly or self.count == 0:
            return mask_whole(sizes, values.numel() - self.count)
        self._threshold = self._find_threshold(sizes.flatten())
        return sizes >= self._threshold

    def _find_threshold(self, sizes: torch.Tensor) -> float:
        """Return the smallest kept size. It moves little between iterations, so few sizes need sorting."""
        if self._threshold is not None and len(sizes) >= SMALL:
            low, high = self._threshold * (1 - NARROW), self._threshold * (1 + NARROW)
            inside = sizes[(sizes >= low) & (sizes < high)]
            place = self.count - int(torch.count_nonzero(sizes >= high))
            if 0 < place <= len(inside):
                return inside.kthvalue(len(inside) + 1 - place).values.item()
        return sizes.kthvalue(len(sizes) + 1 - self.count).values.item()


def find_support(
    matrix: torch.Tensor, target: torch.Tensor, start: torch.Tensor, support: Support, iterations: Iterable[int]
) -> torch.Tensor:
    """Return dense weights of which `support` should keep the largest (ALPS, Algorithm 1).

    `matrix` is A, `target` is `W A`, and `start` is W. `iterations` counts from 1.

    In the paper's notation, the state is `V = B + U / rho`. Its kept part is D, the rest is `U / rho`.
    """
    rho, inverse = RHO, None
    mask = support(start, False)
    before, kept = mask, max(1, int(torch.count_nonzero(mask)))
    values = start.masked_fill(~mask, 0)  # V, with U = 0 at first
    right = torch.empty_like(start)
    weight = torch.empty_like(start)
    for iteration in iterations:
        inverse = _shifted_inverse(matrix, rho) if inverse is None else inverse
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


def _shifted_inverse(matrix: torch.Tensor, rho: float) -> torch.Tensor:
    """Return `(A + rho I)^-1`."""
    shifted = torch.diagonal_scatter(matrix, matrix.diagonal() + rho)
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(shifted, check_errors=True).L)


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
