"""Hessians that can be inverted: what methods that solve least-squares problems share."""

from collections.abc import Callable
from typing import TypeVar

import torch

from ..system.notes import get_logger


logger = get_logger(__name__)
Result = TypeVar("Result")

DAMPENING = 0.01  # of the mean diagonal, where a method has no such hyper-parameter
RAISES = 5  # how often dampening is raised tenfold before giving up


class DampenedHessian:
    """A Hessian with a share of its mean diagonal added to its diagonal; more if that does not make it invertible.

    Args:
        hessian (`Tensor` of float32, shape (in, in)): sum of `x x^T` over a projection's inputs; not changed.
        dampening (`float`): the share to add.
        name (`str`): the projection's, for messages.

    Attributes:
        matrix (`Tensor` of float32, shape (in, in)): the dampened Hessian.
        dead (`Tensor`): boolean, shape (in,): inputs that are always zero. Their diagonal counts as 1.

    Raises:
        `ValueError`: the Hessian is not finite.
    """

    def __init__(self, hessian: torch.Tensor, dampening: float, name: str):
        self.matrix, self.name = hessian.clone(), name
        diagonal = self.matrix.diagonal()
        level = diagonal.mean()
        if not bool(torch.isfinite(level)):
            raise ValueError(f"The Hessian of {name} is not finite: its inputs overflow in the model's dtype.")
        self.dead = diagonal == 0
        diagonal[self.dead] = 1
        self._level = torch.where(level > 0, level, 1)
        self._raises = 0
        self._added = dampening
        diagonal += dampening * self._level

    def solve(self, attempt: Callable[[torch.Tensor], Result | None]) -> Result:
        """What an attempt makes of the matrix; as long as that is None, with more dampening."""
        while (found := attempt(self.matrix)) is None:
            self.raise_dampening()
        return found

    def raise_dampening(self) -> None:
        """Adds tenfold, with a warning. Raises `ValueError` if that was done so often that it will not help."""
        if self._raises == RAISES:
            raise ValueError(
                f"The Hessian of {self.name} cannot be inverted, even with dampening {self._added:g}: take more "
                "calibration sequences (num_samples), or another saliency."
            )
        more = 10 * self._added
        logger.warning(
            f"The Hessian of {self.name} is close to singular: dampening is raised from {self._added:g} to {more:g}."
        )
        self.matrix.diagonal().add_((more - self._added) * self._level)
        self._added, self._raises = more, self._raises + 1


def dense_target(
    weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, dampening: float, name: str
) -> torch.Tensor:
    """The weight that makes of a sparse model's inputs what the given one makes of the dense model's.

    `min ||W X_dense - V X||^2` over sparse V differs by a constant from `min ||(W' - V) X||^2` with
    `W' = W C H^-1`, so whatever prunes W for the inputs X can prune W' instead.

    Args:
        weight (`Tensor` of float32, shape (out, in)): W.
        hessian (`Tensor` of float32, shape (in, in)): H, sum of `x x^T` over the sparse model's inputs.
        cross (`Tensor` of float32, shape (in, in)): C, sum of `x_dense x^T` over the inputs of both.
        dampening (`float`): share of H's mean diagonal that is added to both diagonals.
        name (`str`): the projection's, for messages.

    Returns:
        `Tensor`: float32, shape (out, in).

    Raises:
        `ValueError`: C or H is not finite.
    """
    if not bool(torch.isfinite(cross).all()):
        raise ValueError(f"The inputs of {name} are not finite in the dense model: they overflow in its dtype.")

    def attempt(matrix: torch.Tensor) -> torch.Tensor | None:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed):
            return None
        # As a correction to W, which is small: so rounding is, too.
        added = matrix.diagonal() - hessian.diagonal()
        missing = weight @ (cross + torch.diag(added) - matrix)
        return weight + torch.cholesky_solve(missing.T, factor).T

    return DampenedHessian(hessian, dampening, name).solve(attempt)
