"""The base classes of saliency methods, and the Hessians that weight-updating methods invert."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from ..blocks.statistics import Hessian, Norms, SquaredNorms, activation
from ..common.notes import get_logger
from ..common.registry import OWN, Registry
from ..model.change import Change, NewWeight, Zeros
from ..model.projections import Projection
from .plan import ColumnPattern, Plan, mask_groups, mask_rows, row_counts


logger = get_logger(__name__)
Solution = TypeVar("Solution")

RAISES = 5  # how often dampening is raised tenfold before giving up


@dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of a block's projections. Empty if the saliency looks at weights alone.

    An expert with too few tokens is starved. All its features get the root mean square activation of the layer's other
    experts, so Wanda prunes it by magnitude.
    """

    statistics: Norms = field(default_factory=dict)  # by projection
    activations: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by projection, float32, (in,)
    starved: Sequence[str] = ()  # names of projections of starved experts

    @classmethod
    def of(cls, projections: Sequence[Projection], statistics: Norms, min_tokens: int = 1) -> "Inputs":
        """Return the inputs of projections; an expert with fewer than `min_tokens` tokens is starved."""
        activations = {p.name: activation(statistics[p.name].value) for p in projections}
        starved = [p for p in projections if p.expert is not None and statistics[p.name].tokens < min_tokens]
        squares: dict[str | None, list[torch.Tensor]] = {}  # of the other experts, by layer
        for projection in projections if starved else ():
            if projection.expert is not None and statistics[projection.name].tokens >= min_tokens:
                squares.setdefault(projection.group, []).append(activations[projection.name].square().mean())
        for projection in starved:
            others = squares.get(projection.group)
            mean = torch.stack(others).mean().sqrt() if others else torch.ones((), device=projection.weight.device)
            activations[projection.name] = mean.expand(projection.shape[1])
        return cls(statistics, activations, [projection.name for projection in starved])


@dataclass(frozen=True)
class Saliency(ABC):
    """A method that scores the weights of a projection. The fields of a subclass are its hyperparameters (`saliency_args`).

    Class attributes:
        uses_activations (`bool`): False if the score depends on the weights alone, so no calibration data is needed.
        updates_weights (`bool`): True if kept weights get new values, see [`WeightUpdate`].
        knows_rows (`bool`): False if the rows of a weight cannot differ in sparsity.
        statistic (`type[SquaredNorms]`): the statistic to measure on the inputs of every projection.
        paper (`str`): what to cite; the model card does. Empty: nothing.
        variant (`str`): which of the method's variants the class is; users choose one by this name.
        summary (`str`): what the method does, in a sentence for the model card. Empty: nothing.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    variant: ClassVar[str] = OWN
    summary: ClassVar[str] = ""
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

    def changes(
        self, projections: Sequence[Projection], inputs: Inputs, plan: Plan, pattern: ColumnPattern | None = None
    ) -> dict[str, Change]:
        """Return the changes of projections of a block by name: the zeros of a plan, or of an N:M pattern.

        Raises:
            `ValueError`: a score is not finite, or has another shape than its weight.
        """
        changes: dict[str, Change] = {}
        finite: dict[str, torch.Tensor] = {}
        for projection in projections:
            score = self.score_of(projection, inputs)
            changes[projection.name] = Zeros(mask_of(projection, score, plan, pattern))
            finite[projection.name] = torch.isfinite(score).all()
        check_finite(finite)
        return changes

    def score_of(self, projection: Projection, inputs: Inputs) -> torch.Tensor:
        """Return the saliency of a projection's weights: float32, shape (out, in)."""
        # Copies, because a user's saliency may compute in place.
        weight = projection.weight.to(torch.float32, copy=True)
        activation: Any = inputs.activations.get(projection.name)
        if activation is not None:
            activation = activation.clone()
        score = self.score(weight, activation)
        if score.shape != projection.shape:
            raise ValueError(
                f"{type(self).__name__}.score returned shape {list(score.shape)} for {projection.name}: expected "
                f"{list(projection.shape)}."
            )
        return score


SALIENCIES: Registry[Saliency] = Registry("saliency", __package__)
register_saliency = SALIENCIES.register


@dataclass(frozen=True)
class WeightUpdate(Saliency):
    """A method that also gives the kept weights new values, so that outputs change as little as possible.

    Class attributes:
        solves_alike (`bool`): True if `solve` gives a projection the same bits alone as together with others.
    """

    solves_alike: ClassVar[bool] = False
    updates_weights: ClassVar[bool] = True
    statistic: ClassVar[type[SquaredNorms]] = Hessian

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        """Return `(|W_ij| a_j)^2`: the loss of pruning one weight if the others stay."""
        return (weight * activation).square()

    @abstractmethod
    def solve(
        self,
        weights: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        sparsities: Mapping[str, float | torch.Tensor],
        pattern: ColumnPattern | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the sparse, updated weights of projections with the same input, by name: float32, shape (out, in).

        Args:
            weights (`Mapping[str, Tensor]`): float32, shape (out, in), copies of the projections' weights.
            hessian (`Tensor` of float32, shape (in, in)): sum of `x x^T` over the inputs; not to be changed.
            sparsities (`Mapping[str, float | Tensor]`):
                Share of weights to prune in each projection, in [0, 1]; float64 of shape (out,) if it differs by row,
                and `knows_rows` is True.
            pattern ([`ColumnPattern`], *optional*): N:M pattern to prune by instead. `in` is a multiple of M.

        Raises:
            `ValueError`: the Hessian is not finite or cannot be inverted.
        """

    def changes(
        self, projections: Sequence[Projection], inputs: Inputs, plan: Plan, pattern: ColumnPattern | None = None
    ) -> dict[str, Change]:
        by_input: dict[Any, list[Projection]] = {}  # by the statistic of the input, a Hessian
        for projection in projections:
            by_input.setdefault(inputs.statistics[projection.name], []).append(projection)
        changes: dict[str, Change] = {}
        for statistic, readers in by_input.items():
            first = readers[0]
            starved = first.name in inputs.starved
            hessian = torch.diag(inputs.activations[first.name].square()) if starved else statistic.hessian
            weights = {p.name: p.weight.to(torch.float32, copy=True) for p in readers}
            solved = self.solve(weights, hessian, plan.sparsity, pattern)
            changes |= {name: NewWeight(weight.to(first.owner.dtype)) for name, weight in solved.items()}
        return changes


def mask_of(
    projection: Projection, score: torch.Tensor, plan: Plan, pattern: ColumnPattern | None = None
) -> torch.Tensor:
    """Return the mask of a projection by its score, both of shape (out, in)."""
    if pattern is not None:
        return mask_groups(score, pattern)
    return mask_rows(score, row_counts(plan.sparsity[projection.name], projection.shape), plan.keeps_first)


def check_finite(finite: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` for the first projection whose tensor is False. Wait for the device only once."""
    for name, is_finite in zip(finite, torch.stack(list(finite.values())).tolist() if finite else ()):
        if not is_finite:
            raise ValueError(
                f"The saliency of {name} is not finite: load the model in bfloat16 or float32, or fix your saliency."
            )


def solve_dampened(
    hessian: torch.Tensor, dampening: float, name: str, attempt: Callable[[torch.Tensor], Solution | None]
) -> Solution:
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
    while (result := attempt(matrix)) is None:
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
    return result
