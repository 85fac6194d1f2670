"""What may be asked of a model before it is pruned: the questions that top-ups decide by."""

import math
from collections.abc import Sequence

import torch

from ..engine.statistics import Norms
from ..model.projections import Decoder
from ..saliency import Saliency
from ..sparsity.plan import SparsityPlan
from .alignment_errors import alignment_errors
from .dense_scores import Score, dense_scores
from .deviation import Deviation, find_deviation
from .engine import Engine
from .output_errors import output_errors
from .row_saliency import row_saliency


class Sweep:
    """The questions of top-ups in one place; each is answered in a file of its own. No weight is changed.

    Args:
        engine ([`Engine`]): runs the model. A top-up that makes runs of its own takes them from here.
    """

    def __init__(self, engine: Engine):
        self.engine = engine

    @property
    def decoder(self) -> Decoder:
        """The model's blocks and projections."""
        return self.engine.decoder

    @property
    def saliency(self) -> Saliency:
        """What scores weights."""
        return self.engine.saliency

    @property
    def can_abandon(self) -> bool:
        """Whether running one candidate before the others is worth its extra pass over the weights."""
        return not self.engine.runner.loader.streams and self.engine.processes.count == 1

    def solve_levels(self, target: float) -> None:
        """Lets trials compute with reconstructed weights: see [`Levels`]. For a saliency that updates weights."""
        self.engine.solve_levels(target)

    def dense_norms(self) -> list[Norms]:
        """Squared norms of the dense model's own inputs over the alignment sequences, block by block. Kept."""
        return self.engine.dense().norms

    def alignment_errors(
        self,
        plans: Sequence[SparsityPlan],
        reference: str,
        scope: str,
        metric: str,
        label: str | None,
        bound: float = math.inf,
    ) -> list[float]:
        """Alignment error of every plan: see [`alignment_errors`]."""
        return alignment_errors(self.engine, plans, reference, scope, metric, label, bound)

    def output_errors(
        self,
        plans: Sequence[SparsityPlan],
        metric: str,
        label: str | None,
        reference: str | SparsityPlan = "dense",
        sequences: int | None = None,
    ) -> list[float]:
        """Error of every plan's next-token distributions: see [`output_errors`]."""
        return output_errors(self.engine, plans, metric, label, reference, sequences)

    def deviation(self, plan: SparsityPlan, reference: str, scope: str, metric: str, label: str | None) -> Deviation:
        """Where a plan would lead activations from the dense model's: see [`find_deviation`]."""
        return find_deviation(self.engine, plan, reference, scope, metric, label)

    def row_saliency(self, plan: SparsityPlan, label: str | None) -> dict[str, torch.Tensor]:
        """Sum of the saliency of every row's weights on a plan's own stream: see [`row_saliency`]."""
        return row_saliency(self.engine, plan, label)

    def dense_scores(self, score: Score, label: str) -> list[list[float]]:
        """What a function tells of every dense block: see [`dense_scores`]."""
        return dense_scores(self.engine, score, label)
