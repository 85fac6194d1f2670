"""From activations to what becomes of weights: saliency, mask or update, as a plan or a pattern says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..decoder.projections import Block, Projection
from ..decoder.trial import ChangeOf
from ..metrics.projection_activations import projection_activations
from ..metrics.statistics import Norms
from ..saliency import Saliency
from ..sparsity.changes import NewWeight, Zeros
from ..sparsity.cuts import Cut, apply_cut, find_cut, prune_rows, sort_rows
from ..sparsity.pattern import ColumnPattern, prune_columns
from ..sparsity.plan import SparsityPlan


@dataclass(frozen=True)
class PlanApplier:
    """Makes plans into changes of weights.

    Args:
        saliency ([`Saliency`]): decides which weights of a projection fall.
        pattern ([`ColumnPattern`], *optional*): N:M, if zeros have to follow one.
        min_expert_tokens (`int`): an expert that receives fewer falls back, see [`projection_activations`].
    """

    saliency: Saliency
    pattern: ColumnPattern | None = None
    min_expert_tokens: int = 1

    def activations(self, block: Block, norms: Norms) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Activation of every pruned projection of a block, and which fell back, see [`projection_activations`]."""
        return projection_activations(block, norms, self.min_expert_tokens)

    def score(self, projection: Projection, activations: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Saliency of a projection's weights: float32, shape (out, in)."""
        return self.saliency.score(projection.weight.float(), activations.get(projection.name))

    def mask(self, projection: Projection, score: torch.Tensor, plan: SparsityPlan) -> torch.Tensor:
        """The mask that the plan, or the pattern, makes of a projection's saliency."""
        if self.pattern is not None:
            return prune_columns(score, self.pattern)
        return prune_rows(score, plan.row_counts(projection.name, projection.shape))

    def updated(
        self, projection: Projection, norms: Norms, activation: torch.Tensor, plan: SparsityPlan
    ) -> torch.Tensor:
        """A projection's sparse weight, shape (out, in), for a saliency that updates weights."""
        enough = projection.expert is None or norms[projection.name].tokens >= self.min_expert_tokens
        hessian = norms[projection.name].hessian if enough else torch.diag(activation.square())
        sparsity = plan.sparsity[projection.name]
        weight = self.saliency.prune(projection.weight.float(), hessian, sparsity, self.pattern, projection.name)
        return weight.to(projection.weight.dtype)

    def changes(
        self, block: Block, norms: Norms, plans: Sequence[SparsityPlan], updates: bool = True
    ) -> list[ChangeOf]:
        """For every plan, what it makes of a projection; only one of these exists at a time.

        The weights of a row are ranked once for all plans. What is kept of the ranking is where each plan cuts it.

        Args:
            block ([`Block`]): with its weights at hand.
            norms (`Mapping[str, SquaredNorms]`): what its projections receive, of the saliency's statistic.
            plans (`Sequence[SparsityPlan]`): what to try.
            updates (`bool`): False prunes by score alone with a saliency that updates weights.
        """
        activations, _ = self.activations(block, norms)
        if self.saliency.updates_weights and updates:
            return [self._update_by(plan, norms, activations) for plan in plans]
        if len(plans) == 1 or self.pattern is not None:
            return [self._mask_by(plan, activations) for plan in plans]
        cuts: dict[str, list[Cut]] = {}
        for projection in block.pruned:
            ranked = sort_rows(self.score(projection, activations))
            counts = (plan.row_counts(projection.name, projection.shape) for plan in plans)
            cuts[projection.name] = [find_cut(ranked, count) for count in counts]
        return [self._cut_by(index, cuts, activations) for index in range(len(plans))]

    def _update_by(self, plan: SparsityPlan, norms: Norms, activations: Mapping[str, torch.Tensor]) -> ChangeOf:
        return lambda p: NewWeight(self.updated(p, norms, activations[p.name], plan))

    def _mask_by(self, plan: SparsityPlan, activations: Mapping[str, torch.Tensor]) -> ChangeOf:
        return lambda p: Zeros(self.mask(p, self.score(p, activations), plan))

    def _cut_by(self, index: int, cuts: Mapping[str, list[Cut]], activations: Mapping[str, torch.Tensor]) -> ChangeOf:
        return lambda p: Zeros(apply_cut(self.score(p, activations), cuts[p.name][index]))
