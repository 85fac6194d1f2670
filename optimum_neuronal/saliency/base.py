"""The base classes of saliency methods. To add a method, add a file with a registered subclass of [`Saliency`].

Also the Hessians that methods with least-squares problems invert.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from ..blocks.statistics import Hessian, SquaredNorms, wide_dtype
from ..common.machine import full_precision
from ..common.notes import get_logger
from ..common.registry import Registry
from ..packed.change import Change, NewWeight
from .masks import ColumnPattern


logger = get_logger(__name__)
Result = TypeVar("Result")

DAMPENING = 0.01  # of the mean diagonal, where a method has no such hyper-parameter
RAISES = 5  # how often dampening is raised tenfold before giving up


@dataclass(frozen=True)
class Saliency(ABC):
    """A method that scores the weights of a projection. A subclass's fields are its hyper-parameters (`saliency_args`).

    Class attributes:
        uses_activations (`bool`): False if the score depends on the weights alone, so that no calibration is needed.
        updates_weights (`bool`): True if weights get new values: see [`Solver`].
        knows_rows (`bool`): False if all rows of a weight are pruned together and cannot differ in sparsity.
        statistic (`type[SquaredNorms]`): measured on the inputs of every projection.
    """

    name: ClassVar[str]
    uses_activations: ClassVar[bool] = True
    updates_weights: ClassVar[bool] = False
    knows_rows: ClassVar[bool] = True
    statistic: ClassVar[type[SquaredNorms]] = SquaredNorms

    @abstractmethod
    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        """Return the saliency of every weight. Within each row, the least salient weights are pruned.

        Args:
            weight (`Tensor` of float32, shape (out, in)): a copy of the projection's weight.
            activation (`Tensor` of float32, shape (in,)):
                L2 norm of every input feature: `sqrt(mean over calibration sequences of sum over tokens of x_j^2)`. None
                if the method declares `uses_activations = False`.

        Returns:
            `Tensor`: float32, shape (out, in), non-negative.
        """


SALIENCIES: Registry[Saliency] = Registry("saliency", __package__, Saliency)
register_saliency = SALIENCIES.register


@dataclass(frozen=True)
class Solver(Saliency):
    """A method that gives all weights of a projection new values, so that its outputs change least.

    Its score, which top-ups may ask for, ranks weights before any has changed.

    Class attributes:
        reconstruct (`str`): the default of the config's `reconstruct`: `"dense"` or `"block"`.
    """

    updates_weights: ClassVar[bool] = True
    reconstruct: ClassVar[str] = "block"
    statistic: ClassVar[type[SquaredNorms]] = Hessian

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        """Return `(|W_ij| a_j)^2`: the loss of pruning one weight if the others stay."""
        return (weight * activation).square()

    @abstractmethod
    def solve(
        self,
        weights: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        amounts: Mapping[str, float | torch.Tensor],
        dtype: torch.dtype,
        pattern: ColumnPattern | None = None,
        shared: bool = False,
    ) -> dict[str, Change]:
        """Return the changes of projections with the same input, by name.

        Args:
            weights (`Mapping[str, Tensor]`): name -> weight of float32, shape (out, in); not changed.
            hessian (`Tensor` of float32, shape (in, in)): sum of `x x^T` over their inputs; not changed.
            amounts (`Mapping[str, float | Tensor]`): name -> a sparsity, or bits, from the plan.
            dtype (`torch.dtype`): of the projections.
            pattern ([`ColumnPattern`], *optional*): N:M that the zeros must follow.
            shared (`bool`): True for experts, whose parameter holds other weights too, which are solved apart.

        Raises:
            `ValueError`: an amount or the pattern does not fit, or the Hessian is not finite.
        """

    def toward(self, weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, name: str) -> torch.Tensor:
        """Return the dense weight to solve for inputs of the changed model: see [`dense_target`]."""
        with full_precision():
            return dense_target(weight, hessian, cross, getattr(self, "dampening", DAMPENING), name)

    def quick(self) -> "Solver":
        """Return this method at less cost, for trials."""
        return self


@dataclass(frozen=True)
class WeightUpdate(Solver):
    """A method that prunes a weight, and compensates in the kept weights."""

    @abstractmethod
    def prune(
        self,
        weight: torch.Tensor,
        hessian: torch.Tensor,
        sparsity: float | torch.Tensor,
        pattern: ColumnPattern | None = None,
        name: str = "the weight",
    ) -> torch.Tensor:
        """Return the sparse, updated weight: float32, shape (out, in).

        Args:
            weight (`Tensor` of float32, shape (out, in)): the projection's weight; not changed.
            hessian (`Tensor` of float32, shape (in, in)): sum of `x x^T` over its inputs; not changed.
            sparsity (`float`): share of weights to prune, in [0, 1]; or, if it `knows_rows`, float64 of shape (out,).
            pattern ([`ColumnPattern`], *optional*): N:M instead; `in` is a multiple of M.
            name (`str`): the projection's, for messages.

        Raises:
            `ValueError`: the sparsity or pattern does not fit, see [`check_sparsity`], or the Hessian is not finite.
        """

    def prune_together(
        self,
        weights: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        sparsities: Mapping[str, float | torch.Tensor],
        pattern: ColumnPattern | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the sparse, updated weights of projections with the same input. Arguments: see [`prune`], by name."""
        return {name: self.prune(weight, hessian, sparsities[name], pattern, name) for name, weight in weights.items()}

    def solve(
        self, weights: Any, hessian: Any, amounts: Any, dtype: Any, pattern: Any = None, shared: bool = False
    ) -> dict[str, Change]:
        sparse = self.prune_together(weights, hessian, amounts, pattern)
        return {name: NewWeight(weight.to(dtype)) for name, weight in sparse.items()}


def check_sparsity(
    shape: tuple[int, int], sparsity: float | torch.Tensor, pattern: ColumnPattern | None, name: str
) -> None:
    """Raise `ValueError` unless sparsity and pattern fit a weight. Arguments: see [`WeightUpdate.prune`]."""
    sparsities = torch.as_tensor(sparsity, dtype=torch.float64)
    if sparsities.ndim and sparsities.shape != (shape[0],):
        raise ValueError(
            f"{name} got a sparsity of shape {list(sparsities.shape)}: expected a number, or one for each of {shape[0]} rows."
        )
    if not bool(((sparsities >= 0) & (sparsities <= 1)).all()):
        raise ValueError(
            f"{name} got the sparsity {sparsities.min():g} to {sparsities.max():g}: expected one in [0, 1]."
        )
    if pattern is not None and shape[1] % pattern.group:
        raise ValueError(
            f"{name} has {shape[1]} input features: the pattern {pattern} needs a multiple of {pattern.group}."
        )


class DampenedHessian:
    """A Hessian with a share of its mean diagonal added to its diagonal, more if it is still not invertible.

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
        mean = diagonal.mean()
        if not bool(torch.isfinite(mean)):
            raise ValueError(f"The Hessian of {name} is not finite: its inputs overflow in the model's dtype.")
        self.dead = diagonal == 0
        diagonal[self.dead] = 1
        self._mean = torch.where(mean > 0, mean, 1)
        self._raises = 0
        self._added = dampening
        diagonal += dampening * self._mean

    def solve(self, attempt: Callable[[torch.Tensor], Result | None]) -> Result:
        """Return the result of an attempt on the matrix. While it is None, raise the dampening tenfold, with a warning.

        Raises:
            `ValueError`: the matrix cannot be inverted even so.
        """
        while (found := attempt(self.matrix)) is None:
            if self._raises == RAISES:
                raise ValueError(
                    f"The Hessian of {self.name} cannot be inverted, even with dampening {self._added:g}. Use more "
                    "calibration sequences (num_samples), or another saliency."
                )
            more = 10 * self._added
            logger.warning(
                f"The Hessian of {self.name} is close to singular: dampening is raised from {self._added:g} to {more:g}."
            )
            self.matrix.diagonal().add_((more - self._added) * self._mean)
            self._added, self._raises = more, self._raises + 1
        return found


def inverse_factor(matrix: torch.Tensor) -> torch.Tensor | None:
    """Return the upper Cholesky factor U of a matrix's inverse `U^T U`, float32; None if there is none.

    It is computed in float64. In float32 its error, at least 1e-5, differs between processors, which changes masks and
    perplexities by percents.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix.to(wide_dtype(matrix.device)))
    if bool(failed):
        return None
    inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    inverse = inverse.to(matrix.dtype)
    return None if bool(failed) or not bool(torch.isfinite(inverse).all()) else inverse


def dense_target(
    weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, dampening: float, name: str
) -> torch.Tensor:
    """Return the weight that maps a sparse model's inputs to the given weight's outputs in the dense model: (out, in).

    `min ||W X_dense - V X||^2` over sparse V differs by a constant from `min ||(W' - V) X||^2` with `W' = W C H^-1`. So a
    method that prunes W for the inputs X can prune W' instead.

    Args:
        weight (`Tensor` of float32, shape (out, in)): W.
        hessian (`Tensor` of float32, shape (in, in)): H, sum of `x x^T` over the sparse model's inputs.
        cross (`Tensor` of float32, shape (in, in)): C, sum of `x_dense x^T` over the inputs of both.
        dampening (`float`): share of H's mean diagonal that is added to both diagonals.
        name (`str`): the projection's, for messages.

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
