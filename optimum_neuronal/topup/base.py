"""Base class of top-ups. To add a top-up, add a file beside this one with a registered subclass of [`TopUp`]."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..blocks.statistics import SquaredNorms
from ..common.registry import Registry
from ..model.projections import Decoder, Projection
from ..saliency import Saliency
from ..saliency.plan import Plan
from ..trials import Trials


@dataclass(frozen=True)
class Allocation:
    """Decision of a top-up: sparsity of every projection or row, and how it was found, for the report (JSON)."""

    plan: Plan
    decisions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TopUp(ABC):
    """A method that decides the sparsity of every projection or row, on top of any saliency.

    The fields of a subclass are its hyper-parameters. They come from the config's `topup_args`, sequences as lists.

    Class attributes:
        decides (`bool`): False if every weight matrix gets the config's sparsity, as an N:M pattern demands.
        uses_calibration (`bool`): False if `allocate` never measures anything.
        needs_fixed_weights (`bool`): True if it cannot serve a saliency that updates the kept weights.
        compares_outputs (`bool`): True if `allocate` needs a language-model head, to compare next-token distributions.
        refines (`bool`): True if `refine` edits masks.
        statistic (`type[SquaredNorms]`): statistic of every projection's inputs that `refine` needs.
    """

    name: ClassVar[str]
    decides: ClassVar[bool] = True
    uses_calibration: ClassVar[bool] = True
    needs_fixed_weights: ClassVar[bool] = False
    compares_outputs: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    statistic: ClassVar[type[SquaredNorms]] = SquaredNorms

    def check(self, decoder: Decoder) -> None:
        """Raise `ValueError` if this top-up cannot serve the model. Called before any long work."""

    def suited_to(self, decoder: Decoder) -> "TopUp":
        """Return this top-up, or a copy with hyper-parameters that suit the model. Raise `ValueError` if none do."""
        if self.compares_outputs and not decoder.predicts_next_token:
            raise ValueError(
                f"The top-up {self.name!r} compares next-token distributions, but {type(decoder.model).__name__} has no "
                "causal language-model head. Choose 'search', which then uses alignment errors, or 'neuronal'."
            )
        return self

    def forwards(self, decoder: Decoder, saliency: Saliency, aligned: int, samples: int) -> int:
        """Return roughly how often `allocate` runs a block on one sequence, of so many alignment and calibration sequences."""
        return 0

    def solves(self, saliency: Saliency) -> int:
        """Return roughly how often `allocate` masks or solves each projection."""
        return 0

    @abstractmethod
    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        """Decide the sparsity of every projection, or of every row if the saliency `knows_rows`.

        Args:
            trials ([`Trials`]): the decoder, and measurements on it: dense activations, errors of candidate plans.
            sparsity (`float`): share of all prunable weights to prune, in [0, 1); bits per weight of a prune that quantizes.
        """

    def refine(
        self, projection: Projection, mask: torch.Tensor, score: torch.Tensor, statistic: SquaredNorms | None
    ) -> torch.Tensor:
        """Edit a final mask, if the class `refines`.

        Args:
            projection ([`Projection`]): the projection of the mask.
            mask (`Tensor`): boolean, shape (out, in), True where kept.
            score (`Tensor` of float32, shape (out, in)): the saliency behind the mask.
            statistic ([`SquaredNorms`], *optional*): of the class's `statistic`; None if nothing was calibrated.
        """
        return mask


TOPUPS: Registry[TopUp] = Registry("top-up", __package__, TopUp)
register_topup = TOPUPS.register
