"""Base class of top-ups, their registry, and what a top-up decides.

To add a top-up, add a file beside this one with a registered subclass of [`TopUp`].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..blocks.statistics import SquaredNorms
from ..common.registry import OWN, Registry, title_of
from ..model.change import Change
from ..model.projections import Projection
from ..saliency import Inputs, Saliency
from ..saliency.plan import Plan
from ..trials import PlanEvaluator


@dataclass(frozen=True)
class Allocation:
    """The plan of a top-up: sparsity of every projection or row, and how it was found, for the report (JSON)."""

    plan: Plan
    decisions: dict[str, Any] = field(default_factory=dict)
    norms: type[SquaredNorms] = SquaredNorms  # see [`PlanEvaluator`], for the final pass
    # Changes of a block, its pruned projections and their inputs -> other masks, in the final pass.
    refine: Callable[[Mapping[str, Change], Sequence[Projection], Inputs], dict[str, Change]] | None = None


@dataclass(frozen=True)
class TopUp(ABC):
    """A method that decides the sparsity of every projection or row, on top of any saliency.

    The fields of a subclass are its hyperparameters. They come from the config's `topup_args`, sequences as lists.

    Class attributes:
        paper (`str`): what to cite; the model card does. Empty: nothing.
        variant (`str`): which of the method's variants the class is; users choose one by this name.
        summary (`str`): what the method does, in a sentence for the model card. Empty: nothing.
        decides (`bool`): False if every weight matrix gets the config's sparsity, as an N:M pattern demands.
        uses_calibration (`bool`): False if `allocate` never measures anything.
        needs_fixed_weights (`bool`): True if it cannot serve a saliency that updates the kept weights.
        scores_dense (`bool`):
            True if the final pass scores the weights of the dense model on its own hidden states. By default each block
            receives the outputs of the pruned blocks before it.
        compares_outputs (`bool`): True if `allocate` needs a language-model head, to compare next-token distributions.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    variant: ClassVar[str] = OWN
    summary: ClassVar[str] = ""
    decides: ClassVar[bool] = True
    uses_calibration: ClassVar[bool] = True
    needs_fixed_weights: ClassVar[bool] = False
    scores_dense: ClassVar[bool] = False
    compares_outputs: ClassVar[bool] = False

    def title(self, saliency: Saliency | None = None) -> str:
        """Return what tables call the method, over a saliency if one is given."""
        return title_of(self)

    @abstractmethod
    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        """Decide the sparsity of every projection, or of every row if the saliency `knows_rows`.

        Args:
            evaluator ([`PlanEvaluator`]): the decoder, and measurements on it: dense activations, errors of candidate plans.
            sparsity (`float`): share of all prunable weights to prune, in [0, 1).
        """


TOPUPS: Registry[TopUp] = Registry("top-up", __package__)
register_topup = TOPUPS.register
