"""Makes changes of weights from the inputs of their projections and a sparsity plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..blocks.statistics import Norms, SquaredNorms, activation
from ..model.projections import Block, ChangeOf, Projection
from ..packed.change import Change, NewWeight, Zeros
from ..saliency import Saliency
from ..saliency.masks import ColumnPattern, Cut, apply_cut, find_cut, mask_groups, mask_rows, sort_rows
from ..saliency.plan import Plan, SparsityPlan


Activations = Mapping[str, torch.Tensor]  # projection name -> activation of its input, float32, shape (in,)
# Projection, mask, saliency, statistic of its inputs -> mask. See [`TopUp.refine`].
Refine = Callable[[Projection, torch.Tensor, torch.Tensor, SquaredNorms | None], torch.Tensor]


@dataclass(frozen=True)
class PlanApplier:
    """Makes changes of weights from plans.

    Args:
        saliency ([`Saliency`]): scores or solves the weights of a projection.
        pattern ([`ColumnPattern`], *optional*): N:M, if the zeros have to follow one.
        min_expert_tokens (`int`): an expert that received fewer tokens falls back, see [`PlanApplier.activations`].
    """

    saliency: Saliency
    pattern: ColumnPattern | None = None
    min_expert_tokens: int = 1

    def quick(self) -> "PlanApplier":
        """Return this applier at less cost, for trials."""
        return replace(self, saliency=self.saliency.quick()) if self.saliency.updates_weights else self

    def activations(
        self, block: Block, norms: Norms, projections: Sequence[Projection] | None = None
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return the activations of a block's pruned projections, see [`activation`], and the names that fell back.

        An expert that received fewer tokens than `min_expert_tokens` has no reliable activation. It gets the same value
        for all its features, the root mean square of the activations of the layer's other experts: to Wanda its saliency
        is then its magnitude, on the scale of the others' saliency.

        Args:
            block ([`Block`]): the block of the projections.
            norms (`Mapping[str, SquaredNorms]`): of their inputs.
            projections (`Sequence[Projection]`, *optional*): only these. All experts of a layer belong together.

        Returns:
            `tuple`: projection name -> float32, shape (in,); and the names of starved experts' projections.
        """
        found: dict[str, torch.Tensor] = {}
        starved: list[Projection] = []
        squares: dict[str, list[torch.Tensor]] = {}
        for projection in block.pruned if projections is None else projections:
            found[projection.name] = values = activation(norms[projection.name].value)
            if not self._received_enough(projection, norms):
                starved.append(projection)
            elif projection.expert is not None:
                squares.setdefault(projection.group, []).append(values.square().mean())
        for projection in starved:
            others = squares.get(projection.group)
            level = torch.stack(others).mean().sqrt() if others else torch.ones((), device=projection.weight.device)
            found[projection.name] = level.expand(projection.shape[1])
        return found, [projection.name for projection in starved]

    def score(self, projection: Projection, activations: Activations) -> torch.Tensor:
        """Return the saliency of a projection's weights: float32, shape (out, in).

        Raises:
            `TypeError`, `ValueError`: the saliency, which may be a user's, has returned something else.
        """
        own = activations.get(projection.name)
        score = self.saliency.score(_copied(projection.weight), None if own is None else own.clone())
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
        """Return the mask of the plan, or of the pattern: boolean, shape (out, in), True where kept."""
        if self.pattern is not None:
            return mask_groups(score, self.pattern)
        return mask_rows(score, plan.row_counts(projection.name, projection.shape))

    def prune(
        self,
        projections: Sequence[Projection],
        norms: Norms | None,
        activations: Activations,
        plan: Plan,
        refine: Refine | None = None,
    ) -> dict[str, Change]:
        """Return the changes of the projections by name.

        Args:
            projections (`Sequence[Projection]`): of one block, with their weights at hand.
            norms (`Mapping[str, SquaredNorms]`, *optional*):
                Of their inputs. For a saliency that updates weights [`Hessian`]s; with `cross`, outputs come near to the
                dense model's. None: nothing was measured.
            activations (`Mapping[str, Tensor]`): from [`PlanApplier.activations`].
            plan ([`Plan`]): sparsity or bits of each.
            refine (*optional*): edits every mask.

        Raises:
            `ValueError`: a saliency or a new weight is not finite.
        """
        if self.saliency.updates_weights:
            changes = self._solved(projections, norms, activations, plan)
            new = {name: change.weight for name, change in changes.items() if isinstance(change, NewWeight)}
            _check_finite({name: torch.isfinite(weight).all() for name, weight in new.items()})
            return changes
        masks, finite = {}, {}
        for projection in projections:
            score = self.score(projection, activations)
            finite[projection.name] = torch.isfinite(score).all()
            mask = self.mask(projection, score, plan)
            if refine is not None:
                mask = refine(projection, mask, score, None if norms is None else norms[projection.name])
            masks[projection.name] = mask
        _check_finite(finite)
        return {name: Zeros(mask) for name, mask in masks.items()}

    def _solved(
        self, projections: Sequence[Projection], norms: Norms, activations: Activations, plan: Plan
    ) -> dict[str, Change]:
        """Return the changes of a saliency that updates weights. Weights with one input are solved together."""
        alike: dict[SquaredNorms, list[Projection]] = {}
        for projection in projections:
            alike.setdefault(norms[projection.name], []).append(projection)
        found: dict[str, Change] = {}
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
            dtype, shared = first.owner.dtype, first.expert is not None
            found |= self.saliency.solve(weights, hessian, plan.amounts, dtype, self.pattern, shared)
        return found

    def _received_enough(self, projection: Projection, norms: Norms) -> bool:
        return projection.expert is None or norms[projection.name].tokens >= self.min_expert_tokens

    def changes(self, block: Block, norms: Norms, plans: Sequence[Plan], updates: bool = True) -> list[ChangeOf]:
        """Return a function for every plan: projection -> change. Only one change exists at a time.

        The weights of a row are ranked once for all plans. Of the ranking only each plan's cut is kept.

        Args:
            block ([`Block`]): with its weights at hand.
            norms (`Mapping[str, SquaredNorms]`): of its projections' inputs, of the saliency's statistic.
            plans (`Sequence[Plan]`): candidates.
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

    def _update_by(self, plan: Plan, norms: Norms, activations: Activations) -> ChangeOf:
        return lambda p: self._solved([p], norms, activations, plan)[p.name]

    def _mask_by(self, plan: SparsityPlan, activations: Activations) -> ChangeOf:
        return lambda p: Zeros(self.mask(p, self.score(p, activations), plan))

    def _cut_by(self, index: int, cuts: Mapping[str, list[Cut]], activations: Activations) -> ChangeOf:
        return lambda p: Zeros(apply_cut(self.score(p, activations), cuts[p.name][index]))


def _copied(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy in float32: a saliency, which may be a user's, may compute in place."""
    return weight.to(torch.float32, copy=True)


def _check_finite(finite: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` for the first False by projection name. Waits for the device once."""
    for name, is_finite in zip(finite, torch.stack(list(finite.values())).tolist() if finite else ()):
        if not is_finite:
            raise not_finite(name)


def not_finite(name: str) -> ValueError:
    """Return the error for a projection whose saliency holds NaN or infinity."""
    return ValueError(
        f"The saliency of {name} is not finite: its inputs overflow in the model's dtype, or it computes NaN."
    )
