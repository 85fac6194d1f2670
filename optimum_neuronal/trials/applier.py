"""Makes changes of weights from the inputs of their projections and a sparsity plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from ..engine.statistics import Norms, SquaredNorms, activation
from ..model.projections import Block, ChangeOf, Projection
from ..saliency import Saliency
from ..saliency.rounding import PASSES, choose_codebook, round_kept, round_nearest
from ..sparsity.masks import (
    Change,
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


QUICK = 2  # passes of rounding, for trials

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
        value_bits (`int`, *optional*): bits of quantised values. None: values are not quantised.
        passes (`int`): of rounding over all values of a weight, at most.
    """

    saliency: Saliency
    pattern: ColumnPattern | None = None
    min_expert_tokens: int = 1
    value_bits: int | None = None
    passes: int = PASSES

    def unrounded(self) -> "PlanApplier":
        """Return this applier without quantised values."""
        return replace(self, value_bits=None)

    def quick(self) -> "PlanApplier":
        """Return this applier at less cost, for trials."""
        saliency = self.saliency.quick() if self.saliency.updates_weights else self.saliency
        return replace(self, saliency=saliency, passes=QUICK)

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
        plan: SparsityPlan,
        refine: Refine | None = None,
    ) -> dict[str, Change]:
        """Return the changes of the projections by name.

        Args:
            projections (`Sequence[Projection]`): of one block, with their weights at hand.
            norms (`Mapping[str, SquaredNorms]`, *optional*):
                Of their inputs. For a saliency that updates weights [`Hessian`]s; with `cross`, outputs come near to the
                dense model's. None: nothing was measured.
            activations (`Mapping[str, Tensor]`): from [`PlanApplier.activations`].
            plan ([`SparsityPlan`]): sparsity of each.
            refine (*optional*): edits every mask.

        Raises:
            `ValueError`: a saliency or a new weight is not finite.
        """
        if self.saliency.updates_weights:
            weights = self._updated(projections, norms, activations, plan)
            _check_finite({name: torch.isfinite(weight).all() for name, weight in weights.items()})
            return {name: NewWeight(weight) for name, weight in weights.items()}
        masks, finite = {}, {}
        for projection in projections:
            score = self.score(projection, activations)
            finite[projection.name] = torch.isfinite(score).all()
            mask = self.mask(projection, score, plan)
            if refine is not None:
                mask = refine(projection, mask, score, None if norms is None else norms[projection.name])
            masks[projection.name] = mask
        _check_finite(finite)
        if self.value_bits is None:
            return {name: Zeros(mask) for name, mask in masks.items()}
        sparse = {p.name: Zeros(masks.pop(p.name)).applied(p.weight) for p in projections}
        return {name: NewWeight(weight) for name, weight in self.rounded(projections, sparse, activations).items()}

    def _updated(
        self, projections: Sequence[Projection], norms: Norms, activations: Activations, plan: SparsityPlan
    ) -> dict[str, torch.Tensor]:
        """Return the weights of a saliency that updates them, (out, in). Weights with one input are solved together."""
        alike: dict[SquaredNorms, list[Projection]] = {}
        for projection in projections:
            alike.setdefault(norms[projection.name], []).append(projection)
        found, unrounded = {}, []
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
                importance, own = hessian.diagonal(), hessian if enough else None
                unrounded += [_Unrounded(p, sparse[p.name], importance.clone(), weights[p.name], own) for p in members]
        return found if self.value_bits is None else self._round(unrounded)

    def rounded(
        self,
        projections: Sequence[Projection],
        weights: Mapping[str, torch.Tensor],
        activations: Activations,
        norms: Norms | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return sparse weights with quantised values of `value_bits` and the zeros of the given ones.

        Args:
            projections (`Sequence[Projection]`), activations (`Mapping[str, Tensor]`): as for [`PlanApplier.prune`].
            weights (`Mapping[str, Tensor]`): projection name -> sparse weight of shape (out, in).
            norms (`Mapping[str, Hessian]`, *optional*):
                Of their inputs. With them, values make up for each other's rounding; else each goes to its nearest.
        """
        unrounded = []
        for p in projections:
            sparse, own = _copied(weights[p.name]), activations.get(p.name)
            importance = torch.ones_like(sparse[0]) if own is None else own.square()
            hessian = norms[p.name].hessian if norms is not None and self._received_enough(p, norms) else None
            unrounded.append(_Unrounded(p, sparse, importance, sparse, hessian))
        return self._round(unrounded)

    def _round(self, unrounded: Sequence["_Unrounded"]) -> dict[str, torch.Tensor]:
        """Return rounded weights by name, in their own dtype. What shares a parameter, as experts do, shares a codebook."""
        by_owner: dict[nn.Parameter, list[_Unrounded]] = {}
        for entry in unrounded:
            by_owner.setdefault(entry.projection.owner, []).append(entry)
        rounded = {}
        for owner, members in by_owner.items():
            codebook = choose_codebook(
                [(entry.sparse, entry.importance) for entry in members], self.value_bits, owner.dtype
            )
            for projection, sparse, importance, target, hessian in members:
                if hessian is None:
                    found = round_nearest(sparse, importance, codebook, owner.dtype)
                else:
                    found = round_kept(sparse, target, hessian, codebook, owner.dtype, self.passes)
                rounded[projection.name] = found.to(owner.dtype)
        return rounded

    def _received_enough(self, projection: Projection, norms: Norms) -> bool:
        return projection.expert is None or norms[projection.name].tokens >= self.min_expert_tokens

    def changes(
        self, block: Block, norms: Norms, plans: Sequence[SparsityPlan], updates: bool = True
    ) -> list[ChangeOf]:
        """Return a function for every plan: projection -> change. Only one change exists at a time.

        The weights of a row are ranked once for all plans. Of the ranking only each plan's cut is kept.

        Args:
            block ([`Block`]): with its weights at hand.
            norms (`Mapping[str, SquaredNorms]`): of its projections' inputs, of the saliency's statistic.
            plans (`Sequence[SparsityPlan]`): candidates.
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

    def _update_by(self, plan: SparsityPlan, norms: Norms, activations: Activations) -> ChangeOf:
        return lambda p: NewWeight(self._updated([p], norms, activations, plan)[p.name])

    def _mask_by(self, plan: SparsityPlan, activations: Activations) -> ChangeOf:
        return lambda p: Zeros(self.mask(p, self.score(p, activations), plan))

    def _cut_by(self, index: int, cuts: Mapping[str, list[Cut]], activations: Activations) -> ChangeOf:
        return lambda p: Zeros(apply_cut(self.score(p, activations), cuts[p.name][index]))


class _Unrounded(NamedTuple):
    """A projection's sparse weight before its values are quantised.

    Args:
        projection ([`Projection`]): of the weight.
        sparse (`Tensor` of float32, shape (out, in)): the weight.
        importance (`Tensor` of float32, shape (in,)): cost of a squared error of each input's weights.
        target (`Tensor` of float32, shape (out, in)): the dense weight that it stands for.
        hessian (`Tensor` of float32, shape (in, in), *optional*): sum of `x x^T` over its inputs.
    """

    projection: Projection
    sparse: torch.Tensor
    importance: torch.Tensor
    target: torch.Tensor
    hessian: torch.Tensor | None


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
