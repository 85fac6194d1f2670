"""What a top-up is. To add one, add a file beside this one with a registered subclass of [`TopUp`]."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..engine.passes import Pass
from ..engine.statistics import SquaredNorms
from ..model.projections import Decoder, Projection
from ..registry import Registry
from ..saliency import Saliency
from ..sparsity.plan import SparsityPlan
from ..trials.levels import Levels
from ..trials.sweep import Sweep


@dataclass(frozen=True)
class Allocation:
    """What a top-up decided.

    Args:
        plan ([`SparsityPlan`]): where the sparsity goes.
        decisions (`dict`): how it was found, for the report; JSON-serialisable.
        levels ([`Levels`], *optional*): solved weights that the plan was found by.
    """

    plan: SparsityPlan
    decisions: dict[str, Any] = field(default_factory=dict)
    levels: Levels | None = None


@dataclass(frozen=True)
class TopUp(ABC):
    """Decides where the sparsity goes, on top of any saliency. The fields of a subclass are its hyper-parameters: the
    config gives it its `topup_args` and nothing else, in which sequences are lists, as JSON has them.

    Class attributes:
        decides (`bool`): False if every weight matrix gets the sparsity that was asked for, as an N:M pattern demands.
        uses_calibration (`bool`): False if `allocate` never asks the sweep for anything.
        rows_are_optional (`bool`): True if `allocate` leaves rows alone where the saliency cannot tell them apart.
        without_rows (`Mapping[str, Any]`): hyper-parameters with which rows are left alone; none if there are none.
        needs_fixed_weights (`bool`): True if it cannot serve a saliency that updates the weights that stay.
        compares_outputs (`bool`): True if `allocate` asks for next-token distributions: without a language-model head, it
            cannot.
        refines (`bool`): True if `refine` edits masks.
        statistic (`type[SquaredNorms]`): what `refine` wants to know of the inputs of every projection.
    """

    name: ClassVar[str]
    decides: ClassVar[bool] = True
    uses_calibration: ClassVar[bool] = True
    rows_are_optional: ClassVar[bool] = False
    without_rows: ClassVar[Mapping[str, Any]] = {}
    needs_fixed_weights: ClassVar[bool] = False
    compares_outputs: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    statistic: ClassVar[type[SquaredNorms]] = SquaredNorms

    @property
    def by_row(self) -> bool:
        """Whether rows of one projection may get different sparsities."""
        return False

    def check(self, decoder: Decoder) -> None:
        """Raises `ValueError` if this top-up cannot serve the model. Called before any long work."""

    def suited_to(self, decoder: Decoder) -> "TopUp":
        """This top-up as it can serve the model: itself, or one with other hyper-parameters.

        Raises:
            `ValueError`: it cannot serve the model.
        """
        if self.compares_outputs and not decoder.predicts_next_token:
            raise ValueError(
                f"The top-up {self.name!r} compares next-token distributions, and {type(decoder.model).__name__} has no "
                "causal language-model head: choose 'search', which then goes by alignment errors, or 'neuronal'."
            )
        return self

    def passes(self) -> tuple[Pass, ...]:
        """What `allocate` asks, in its order, if it abandons nothing: a dry run tells the cost by it."""
        return ()

    def uses_levels(self, saliency: Saliency) -> bool:
        """Whether `allocate` has weights solved at a few sparsities for its candidates, see [`Levels`]."""
        return False

    def passes_with(self, saliency: Saliency) -> tuple[Pass, ...]:
        """The same with a certain saliency, where it depends on that."""
        return self.passes()

    @abstractmethod
    def allocate(self, sweep: Sweep, sparsity: float) -> Allocation:
        """Decides the sparsity of every projection or row.

        Args:
            sweep ([`Sweep`]): the decoder, and what may be asked of it: dense activations, errors of trial plans.
            sparsity (`float`): share of all prunable weights to prune, in [0, 1).
        """

    def refine(
        self, projection: Projection, mask: torch.Tensor, score: torch.Tensor, statistic: SquaredNorms | None
    ) -> torch.Tensor:
        """Edits a final mask, if the class says that it `refines`. The default returns it unchanged.

        Args:
            projection ([`Projection`]): whose mask it is.
            mask (`Tensor`): boolean, shape (out, in), True where kept.
            score (`Tensor` of float32, shape (out, in)): the saliency that the mask was made of.
            statistic ([`SquaredNorms`], *optional*): of the class's `statistic`; None if nothing was calibrated.
        """
        return mask


TOPUPS: Registry[TopUp] = Registry("top-up", __package__, TopUp)
register_topup = TOPUPS.register
