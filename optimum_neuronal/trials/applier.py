"""From activations to what becomes of weights: saliency, mask or update, as a plan or a pattern says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..engine.statistics import Norms, SquaredNorms
from ..model.projections import Block, Projection
from ..model.trial import ChangeOf
from ..saliency import Saliency
from ..saliency.rounding import SWEEPS
from ..sparsity.masks import (
    ColumnPattern,
    Cut,
    NewWeight,
    Zeros,
    apply_cut,
    find_cut,
    mask_groups,
    mask_rows,
    sort_rows,
)
from ..sparsity.plan import SparsityPlan
from .few_bits import Solved, round_solved
from .projection_activations import projection_activations


QUICK = 2  # sweeps, where weights are rounded for trials


@dataclass(frozen=True)
class PlanApplier:
    """Makes plans into changes of weights.

    Args:
        saliency ([`Saliency`]): decides which weights of a projection fall.
        pattern ([`ColumnPattern`], *optional*): N:M, if zeros have to follow one.
        min_expert_tokens (`int`): an expert that receives fewer falls back, see [`projection_activations`].
        value_bits (`int`, *optional*): of the weights that stay, if they are to be few, see [`round_solved`].
        sweeps (`int`): of rounding, over all values of a weight, at most.
    """

    saliency: Saliency
    pattern: ColumnPattern | None = None
    min_expert_tokens: int = 1
    value_bits: int | None = None
    sweeps: int = SWEEPS

    def unrounded(self) -> "PlanApplier":
        """This one, but values keep all their bits."""
        return replace(self, value_bits=None)

    def quick(self) -> "PlanApplier":
        """This one at less cost, for trials."""
        saliency = self.saliency.quick() if self.saliency.updates_weights else self.saliency
        return replace(self, saliency=saliency, sweeps=QUICK)

    def activations(
        self, block: Block, norms: Norms, projections: Sequence[Projection] | None = None
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Activation of every pruned projection of a block, and which fell back, see [`projection_activations`].

        Args:
            block ([`Block`]), norms (`Mapping[str, SquaredNorms]`): which, and what it receives.
            projections (`Sequence[Projection]`, *optional*): only these.
        """
        chosen = block.pruned if projections is None else projections
        return projection_activations(chosen, norms, self.min_expert_tokens)

    def score(self, projection: Projection, activations: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Saliency of a projection's weights: float32, shape (out, in).

        Raises:
            `TypeError`, `ValueError`: the saliency, which may be anyone's, has returned something else.
        """
        activation = activations.get(projection.name)
        score = self.saliency.score(_copied(projection.weight), None if activation is None else activation.clone())
        if not isinstance(score, torch.Tensor):
            kind = type(score).__name__
            raise TypeError(f"{type(self.saliency).__name__}.score returned a {kind}: expected a tensor.")
        if score.shape != projection.shape:
            raise ValueError(
                f"{type(self.saliency).__name__}.score returned the shape {tuple(score.shape)} for {projection.name}: "
                f"expected {tuple(projection.shape)}, a number for every weight."
            )
        return score

    def mask(self, projection: Projection, score: torch.Tensor, plan: SparsityPlan) -> torch.Tensor:
        """The mask that the plan, or the pattern, makes of a projection's saliency."""
        if self.pattern is not None:
            return mask_groups(score, self.pattern)
        return mask_rows(score, plan.row_counts(projection.name, projection.shape))

    def updated(
        self,
        projections: Sequence[Projection],
        norms: Norms,
        activations: Mapping[str, torch.Tensor],
        plan: SparsityPlan,
    ) -> dict[str, torch.Tensor]:
        """Sparse weights, shape (out, in), for a saliency that updates weights; those with the same input together.

        Args:
            projections (`Sequence[Projection]`): whose weights are wanted.
            norms (`Mapping[str, Hessian]`): of their inputs; with `cross`, outputs come near to the dense model's.
            activations (`Mapping[str, Tensor]`): from [`activations`].
            plan ([`SparsityPlan`]): sparsity of each.
        """
        alike: dict[SquaredNorms, list[Projection]] = {}
        for projection in projections:
            alike.setdefault(norms[projection.name], []).append(projection)
        found, solved = {}, []
        for statistic, members in alike.items():
            first = members[0]
            enough = self._received_enough(first, norms)
            hessian = statistic.hessian if enough else torch.diag(activations[first.name].square())
            weights = {p.name: _copied(p.weight) for p in members}
            if statistic.cross is not None:
                weights = {
                    name: self.saliency.toward(weight, hessian, statistic.cross, name)
                    for name, weight in weights.items()
                }
            sparse = self.saliency.prune_together(weights, hessian, plan.sparsity, self.pattern)
            if self.value_bits is None:
                found |= {p.name: sparse[p.name].to(p.weight.dtype) for p in members}
            else:
                own = hessian if enough else None
                solved += [
                    Solved(p, sparse[p.name], hessian.diagonal().clone(), weights[p.name], own) for p in members
                ]
        return found if self.value_bits is None else round_solved(solved, self.value_bits, self.sweeps)

    def weights(
        self,
        projections: Sequence[Projection],
        norms: Norms,
        activations: Mapping[str, torch.Tensor],
        plan: SparsityPlan,
    ) -> dict[str, torch.Tensor]:
        """Sparse weights of any saliency, with values of `value_bits` if there are such. Arguments: as for [`updated`]."""
        if self.saliency.updates_weights:
            return self.updated(projections, norms, activations, plan)
        masks = {p.name: self.mask(p, self.score(p, activations), plan) for p in projections}
        sparse = {p.name: torch.where(masks.pop(p.name), p.weight, 0) for p in projections}
        return sparse if self.value_bits is None else self.rounded(projections, sparse, activations)

    def rounded(
        self,
        projections: Sequence[Projection],
        weights: Mapping[str, torch.Tensor],
        activations: Mapping[str, torch.Tensor],
        norms: Norms | None = None,
    ) -> dict[str, torch.Tensor]:
        """Sparse weights with values of `value_bits`, on the same support.

        Args:
            projections (`Sequence[Projection]`), activations (`Mapping[str, Tensor]`): as for [`updated`].
            weights (`Mapping[str, Tensor]`): projection name -> sparse weight of shape (out, in).
            norms (`Mapping[str, Hessian]`, *optional*):
                Of their inputs; with them, values make up for each other's rounding, else each goes to its nearest.
        """
        solved = []
        for p in projections:
            sparse, activation = _copied(weights[p.name]), activations.get(p.name)
            importance = torch.ones_like(sparse[0]) if activation is None else activation.square()
            hessian = norms[p.name].hessian if norms is not None and self._received_enough(p, norms) else None
            solved.append(Solved(p, sparse, importance, sparse, hessian))
        return round_solved(solved, self.value_bits, self.sweeps)

    def _received_enough(self, projection: Projection, norms: Norms) -> bool:
        return projection.expert is None or norms[projection.name].tokens >= self.min_expert_tokens

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
        return lambda p: NewWeight(self.updated([p], norms, activations, plan)[p.name])

    def _mask_by(self, plan: SparsityPlan, activations: Mapping[str, torch.Tensor]) -> ChangeOf:
        return lambda p: Zeros(self.mask(p, self.score(p, activations), plan))

    def _cut_by(self, index: int, cuts: Mapping[str, list[Cut]], activations: Mapping[str, torch.Tensor]) -> ChangeOf:
        return lambda p: Zeros(apply_cut(self.score(p, activations), cuts[p.name][index]))


def _copied(weight: torch.Tensor) -> torch.Tensor:
    """In float32, and never the weight itself: a saliency, which may be anyone's, may compute in place."""
    return weight.to(torch.float32, copy=True)


def not_finite(name: str) -> ValueError:
    """The error for a projection whose saliency holds NaN or infinity."""
    return ValueError(
        f"The saliency of {name} is not finite: its inputs overflow in the model's dtype, or it computes NaN."
    )
