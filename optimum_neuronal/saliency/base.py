"""The base classes of saliency methods, and the Hessians that weight-updating methods invert."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from ..blocks.statistics import Hessian, SquaredNorms, wide_dtype
from ..common.notes import get_logger
from ..common.registry import Registry
from ..model.change import Change, NewWeight
from .plan import ColumnPattern


logger = get_logger(__name__)
Result = TypeVar("Result")

RAISES = 5  # how often dampening is raised tenfold before giving up


@dataclass(frozen=True)
class Saliency(ABC):
    """A method that scores the weights of a projection. The fields of a subclass are its hyperparameters (`saliency_args`).

    Class attributes:
        uses_activations (`bool`): False if the score depends on the weights alone, so no calibration data is needed.
        updates_weights (`bool`): True if kept weights get new values, see [`WeightUpdate`].
        knows_rows (`bool`): False if the rows of a weight cannot differ in sparsity.
        statistic (`type[SquaredNorms]`): the statistic to measure on the inputs of every projection.
        paper (`str`): what to cite; the model card does. Empty: nothing.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    uses_activations: ClassVar[bool] = True
    updates_weights: ClassVar[bool] = False
    knows_rows: ClassVar[bool] = True
    statistic: ClassVar[type[SquaredNorms]] = SquaredNorms

    @abstractmethod
    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        """Return the saliency of every weight. The least salient weights of each row are pruned.

        Args:
            weight (`Tensor` of float32, shape (out, in)): a copy of the projection's weight.
            activation (`Tensor` of float32, shape (in,)):
                L2 norm of every input feature: `sqrt(mean over calibration sequences of sum over tokens of x_j^2)`. None
                if `uses_activations` is False.

        Returns:
            `Tensor`: float32, shape (out, in), non-negative.
        """


SALIENCIES: Registry[Saliency] = Registry("saliency", __package__)
register_saliency = SALIENCIES.register


@dataclass(frozen=True)
class Solver(Saliency):
    """A method that computes new weights, so that the projection's outputs change least."""

    updates_weights: ClassVar[bool] = True
    statistic: ClassVar[type[SquaredNorms]] = Hessian
    dampening: ClassVar[float] = 0.01  # share of the mean diagonal; a hyper-parameter of some methods

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
        """Return the changes of projections with the same input, by name. Arguments: see [`WeightUpdate.prune`], by name.

        `amounts` are the plan's sparsities or bits, `dtype` is that of the model. `shared` is True for experts, whose
        parameter also holds the weights of other experts.
        """


@dataclass(frozen=True)
class WeightUpdate(Solver):
    """A method that prunes a weight and adjusts the kept weights to compensate."""

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
            sparsity (`float` or `Tensor` of float64, shape (out,)): share of weights to prune, in [0, 1]. By row only if
                `knows_rows` is True.
            pattern ([`ColumnPattern`], *optional*): N:M pattern to prune by instead. `in` is a multiple of M.
            name (`str`): the projection's name, for messages.

        Raises:
            `ValueError`: the Hessian is not finite or cannot be inverted.
        """

    def solve(
        self, weights: Any, hessian: Any, amounts: Any, dtype: Any, pattern: Any = None, shared: bool = False
    ) -> dict[str, Change]:
        return {
            name: NewWeight(self.prune(weight, hessian, amounts[name], pattern, name).to(dtype))
            for name, weight in weights.items()
        }


def solve_dampened(
    hessian: torch.Tensor, dampening: float, name: str, attempt: Callable[[torch.Tensor], Result | None]
) -> Result:
    """Return `attempt(matrix)`, with a copy of the Hessian, (in, in), and a share of its mean diagonal on its diagonal.

    Inputs that are always zero count as one. While the result is None, dampening is raised tenfold, with a warning.
    """
    matrix = hessian.clone()
    diagonal = matrix.diagonal()
    mean = diagonal.mean()
    if not bool(torch.isfinite(mean)):
        raise ValueError(f"The Hessian of {name} is not finite: load the model in bfloat16 or float32.")
    diagonal[diagonal == 0] = 1
    mean = torch.where(mean > 0, mean, 1)
    diagonal += dampening * mean
    raises = 0
    while (found := attempt(matrix)) is None:
        before, dampening, raises = dampening, 10 * dampening, raises + 1
        if raises > RAISES:
            raise ValueError(
                f"The Hessian of {name} cannot be inverted, even with dampening {before:g}. Use more calibration "
                "sequences (num_samples), or another saliency."
            )
        logger.warning(
            f"The Hessian of {name} is close to singular: dampening is raised from {before:g} to {dampening:g}."
        )
        diagonal += (dampening - before) * mean
    return found


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
