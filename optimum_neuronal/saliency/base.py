"""What a saliency method is. To add one, add a file beside this one with a registered subclass of [`Saliency`]."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..engine.statistics import Hessian, SquaredNorms
from ..registry import Registry
from ..sparsity.masks import ColumnPattern
from ..system.compute import full_precision
from .dampening import DAMPENING, dense_target


@dataclass(frozen=True)
class Saliency(ABC):
    """Scores the weights of a projection. The fields of a subclass are its hyper-parameters (`saliency_args`).

    Class attributes:
        uses_activations (`bool`): False if the score depends on the weights alone, so that no calibration is needed.
        updates_weights (`bool`): True if kept weights change as well: see [`WeightUpdate`].
        knows_rows (`bool`): False if all rows of a weight are pruned together and cannot differ in sparsity.
        statistic (`type[SquaredNorms]`): what is gathered of the inputs of every projection.
    """

    name: ClassVar[str]
    uses_activations: ClassVar[bool] = True
    updates_weights: ClassVar[bool] = False
    knows_rows: ClassVar[bool] = True
    statistic: ClassVar[type[SquaredNorms]] = SquaredNorms

    @abstractmethod
    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        """Saliency of every weight. Within each row, the least salient weights are pruned.

        Args:
            weight (`Tensor` of float32, shape (out, in)): a copy of the projection's weight.
            activation (`Tensor` of float32, shape (in,)):
                L2 norm of every input feature: `sqrt(mean over calibration sequences of sum over tokens of x_j^2)`. None if
                the method declares `uses_activations = False`.

        Returns:
            `Tensor`: float32, shape (out, in), non-negative.
        """


SALIENCIES: Registry[Saliency] = Registry("saliency", __package__, Saliency)
register_saliency = SALIENCIES.register


@dataclass(frozen=True)
class WeightUpdate(Saliency):
    """A method that prunes a weight as a whole and makes up for it in the weights that stay.

    Its saliency, which top-ups may ask for, ranks weights before any is updated.

    Class attributes:
        reconstruct (`str`): what the config's `reconstruct` is where it is not given: `"dense"` or `"block"`.
    """

    updates_weights: ClassVar[bool] = True
    reconstruct: ClassVar[str] = "block"
    statistic: ClassVar[type[SquaredNorms]] = Hessian

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        """`(|W_ij| a_j)^2`: the loss of pruning one weight if the others stay."""
        return (weight * activation).square()

    @abstractmethod
    def prune(
        self,
        weight: torch.Tensor,
        hessian: torch.Tensor,
        sparsity: float | torch.Tensor,
        pattern: ColumnPattern | None = None,
        name: str = "the weight",
    ) -> torch.Tensor:
        """The sparse, updated weight.

        Args:
            weight (`Tensor` of float32, shape (out, in)): the projection's weight; not changed.
            hessian (`Tensor` of float32, shape (in, in)): sum of `x x^T` over its inputs; not changed.
            sparsity (`float`): share of weights to prune, in [0, 1]; or, if it `knows_rows`, float64 of shape (out,).
            pattern ([`ColumnPattern`], *optional*): N:M instead; `in` is a multiple of M.
            name (`str`): the projection's, for messages.

        Returns:
            `Tensor`: float32, shape (out, in).

        Raises:
            `ValueError`: what is asked cannot be done, see [`check_asked`], or the Hessian is not finite.
        """

    def prune_together(
        self,
        weights: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        sparsities: Mapping[str, float | torch.Tensor],
        pattern: ColumnPattern | None = None,
    ) -> dict[str, torch.Tensor]:
        """The sparse, updated weights of projections that receive the same input. Arguments: [`prune`], by name."""
        return {name: self.prune(weight, hessian, sparsities[name], pattern, name) for name, weight in weights.items()}

    def toward(self, weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, name: str) -> torch.Tensor:
        """The dense weight to prune so that outputs come near to those on other inputs: see [`dense_target`]."""
        with full_precision():
            return dense_target(weight, hessian, cross, getattr(self, "dampening", DAMPENING), name)

    def quick(self) -> "WeightUpdate":
        """This method at less cost, for trials."""
        return self

    def operations(self, shape: tuple[int, int]) -> int:
        """Floating-point operations that [`prune`] takes for a weight of shape (out, in), about; 0 if not known."""
        return 0

    def made(self, shape: tuple[int, int]) -> int:
        """Values that [`prune`] computes one by one for such a weight, beside matrix products; 0 if they hardly count."""
        return 0


def check_asked(
    shape: tuple[int, int], sparsity: float | torch.Tensor, pattern: ColumnPattern | None, name: str
) -> None:
    """Raises `ValueError` if a weight cannot be pruned so. Arguments: [`WeightUpdate.prune`]."""
    asked = torch.as_tensor(sparsity, dtype=torch.float64)
    if asked.ndim and asked.shape != (shape[0],):
        raise ValueError(
            f"{name} was given a sparsity of shape {list(asked.shape)}: expected a number, or one for each of its "
            f"{shape[0]} rows."
        )
    if not bool(((asked >= 0) & (asked <= 1)).all()):
        raise ValueError(f"{name} was given the sparsity {asked.min():g} to {asked.max():g}: expected one in [0, 1].")
    if pattern is None:
        return
    if shape[1] % pattern.group:
        raise ValueError(
            f"{name} has {shape[1]} input features, not a multiple of {pattern.group} as {pattern} needs."
        )
    if len(asked.unique()) > 1:
        raise ValueError(
            f"{name} was given rows of unequal sparsity, but the pattern {pattern} prunes every row alike: give one of "
            "the two."
        )
