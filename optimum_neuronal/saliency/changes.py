"""Changes of weights that a saliency makes for a sparsity plan, from the inputs of the projections."""

from collections.abc import Callable, Mapping, Sequence

import torch

from ..blocks.statistics import Norms, SquaredNorms, activation
from ..model.projections import Block, ChangeOf, Projection
from ..packed.change import Change, NewWeight, Zeros
from .base import Saliency
from .masks import ColumnPattern, Cut, apply_cut, find_cut, mask_groups, mask_rows, sort_rows
from .plan import Plan, SparsityPlan


Activations = Mapping[str, torch.Tensor]  # projection name -> activation of its input, float32, shape (in,)
# Projection, mask, saliency, statistic of its inputs -> mask. See [`TopUp.refine`].
Refine = Callable[[Projection, torch.Tensor, torch.Tensor, SquaredNorms | None], torch.Tensor]


def find_activations(
    projections: Sequence[Projection], norms: Norms, min_tokens: int = 1
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the activations of projections by name, (in,), and the names of starved experts' projections.

    An expert that received fewer tokens than `min_tokens` has no reliable activation. All its features get the root mean
    square of the activations of the layer's other experts. Wanda then prunes it by magnitude.

    Args:
        projections (`Sequence[Projection]`): of one block, with all experts of a layer or none.
        norms (`Mapping[str, SquaredNorms]`): of their inputs.
        min_tokens (`int`): tokens that an expert needs for an activation of its own.
    """
    found: dict[str, torch.Tensor] = {}
    starved: list[Projection] = []
    squares: dict[str, list[torch.Tensor]] = {}
    for projection in projections:
        found[projection.name] = values = activation(norms[projection.name].value)
        if projection.expert is None:
            continue
        if norms[projection.name].tokens < min_tokens:
            starved.append(projection)
        else:
            squares.setdefault(projection.group, []).append(values.square().mean())
    for projection in starved:
        others = squares.get(projection.group)
        mean = torch.stack(others).mean().sqrt() if others else torch.ones((), device=projection.weight.device)
        found[projection.name] = mean.expand(projection.shape[1])
    return found, [projection.name for projection in starved]


def score_projection(saliency: Saliency, projection: Projection, activations: Activations) -> torch.Tensor:
    """Return the saliency of a projection's weights: float32, shape (out, in).

    Raises:
        `ValueError`: a user's saliency returned something else.
    """
    own = activations.get(projection.name)
    score = saliency.score(_copied(projection.weight), None if own is None else own.clone())
    if not isinstance(score, torch.Tensor) or score.shape != projection.shape:
        found = f"shape {list(score.shape)}" if isinstance(score, torch.Tensor) else type(score).__name__
        raise ValueError(
            f"{type(saliency).__name__}.score returned {found} for {projection.name}: expected a tensor of shape "
            f"{list(projection.shape)}."
        )
    return score


def prune_projections(
    saliency: Saliency,
    projections: Sequence[Projection],
    norms: Norms | None,
    plan: Plan,
    pattern: ColumnPattern | None = None,
    min_tokens: int = 1,
    refine: Refine | None = None,
) -> tuple[dict[str, Change], list[str]]:
    """Return the changes of projections by name, and the names of starved experts' projections.

    Args:
        saliency ([`Saliency`]): scores or solves the weights.
        projections (`Sequence[Projection]`): of one block, with their weights at hand.
        norms (`Mapping[str, SquaredNorms]`, *optional*):
            Of their inputs; [`Hessian`]s if the saliency updates weights. With `cross`, outputs are fitted to the dense
            model's. None if the saliency uses no activations.
        plan ([`Plan`]): sparsity or bits of each.
        pattern ([`ColumnPattern`], *optional*): N:M that the zeros must follow.
        min_tokens (`int`): see [`find_activations`].
        refine (*optional*): edits every mask.

    Raises:
        `ValueError`: a saliency or a new weight is not finite.
    """
    activations, starved = ({}, []) if norms is None else find_activations(projections, norms, min_tokens)
    if saliency.updates_weights:
        changes = _solve(saliency, projections, norms, activations, starved, plan, pattern)
        new = {name: change.weight for name, change in changes.items() if isinstance(change, NewWeight)}
        _check_finite({name: torch.isfinite(weight).all() for name, weight in new.items()})
        return changes, starved
    masks, finite = {}, {}
    for projection in projections:
        score = score_projection(saliency, projection, activations)
        finite[projection.name] = torch.isfinite(score).all()
        mask = _mask(projection, score, plan, pattern)
        if refine is not None:
            mask = refine(projection, mask, score, None if norms is None else norms[projection.name])
        masks[projection.name] = mask
    _check_finite(finite)
    return {name: Zeros(mask) for name, mask in masks.items()}, starved


def trial_changes(
    saliency: Saliency,
    block: Block,
    norms: Norms,
    plans: Sequence[Plan],
    pattern: ColumnPattern | None = None,
    min_tokens: int = 1,
    updates: bool = True,
) -> list[ChangeOf]:
    """Return a function for every plan: projection -> change. Only one change exists at a time.

    The weights of a row are ranked once for all plans. Of the ranking only each plan's cut is kept.

    Args:
        block ([`Block`]): with its weights at hand.
        norms (`Mapping[str, SquaredNorms]`): of its projections' inputs, of the saliency's statistic.
        plans (`Sequence[Plan]`): candidates.
        updates (`bool`): False to prune by score alone even if the saliency updates weights.

    Other arguments: see [`prune_projections`].
    """
    activations, starved = find_activations(block.pruned, norms, min_tokens)

    def score(projection: Projection) -> torch.Tensor:
        return score_projection(saliency, projection, activations)

    def update_by(plan: Plan) -> ChangeOf:
        return lambda p: _solve(saliency, [p], norms, activations, starved, plan, pattern)[p.name]

    def mask_by(plan: SparsityPlan) -> ChangeOf:
        return lambda p: Zeros(_mask(p, score(p), plan, pattern))

    def cut_by(index: int) -> ChangeOf:
        return lambda p: Zeros(apply_cut(score(p), cuts[p.name][index]))

    if saliency.updates_weights and updates:
        return [update_by(plan) for plan in plans]
    if len(plans) == 1 or pattern is not None:
        return [mask_by(plan) for plan in plans]
    cuts: dict[str, list[Cut]] = {}
    for projection in block.pruned:
        ranked = sort_rows(score(projection))
        counts = (plan.row_counts(projection.name, projection.shape) for plan in plans)
        cuts[projection.name] = [find_cut(ranked, count) for count in counts]
    return [cut_by(index) for index in range(len(plans))]


def not_finite(name: str) -> ValueError:
    """Return the error for a projection whose saliency holds NaN or infinity."""
    return ValueError(
        f"The saliency of {name} is not finite: its inputs overflow in the model's dtype, or it computes NaN."
    )


def _solve(
    saliency: Saliency,
    projections: Sequence[Projection],
    norms: Norms,
    activations: Activations,
    starved: Sequence[str],
    plan: Plan,
    pattern: ColumnPattern | None,
) -> dict[str, Change]:
    """Return the changes of a saliency that updates weights. Weights with the same input are solved together."""
    alike: dict[SquaredNorms, list[Projection]] = {}
    for projection in projections:
        alike.setdefault(norms[projection.name], []).append(projection)
    found: dict[str, Change] = {}
    for statistic, members in alike.items():
        first = members[0]
        hessian = torch.diag(activations[first.name].square()) if first.name in starved else statistic.hessian
        weights = {p.name: _copied(p.weight) for p in members}
        if statistic.cross is not None:
            weights = {
                name: saliency.toward(weight, hessian, statistic.cross, name) for name, weight in weights.items()
            }
        dtype, shared = first.owner.dtype, first.expert is not None
        found |= saliency.solve(weights, hessian, plan.amounts, dtype, pattern, shared)
    return found


def _mask(
    projection: Projection, score: torch.Tensor, plan: SparsityPlan, pattern: ColumnPattern | None
) -> torch.Tensor:
    """Return the mask of the plan, or of the pattern: boolean, shape (out, in), True where kept."""
    if pattern is not None:
        return mask_groups(score, pattern)
    return mask_rows(score, plan.row_counts(projection.name, projection.shape))


def _copied(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy in float32: a user's saliency may compute in place."""
    return weight.to(torch.float32, copy=True)


def _check_finite(finite: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` for the first False by projection name. Waits for the device once."""
    for name, is_finite in zip(finite, torch.stack(list(finite.values())).tolist() if finite else ()):
        if not is_finite:
            raise not_finite(name)
