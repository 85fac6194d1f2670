"""Prune projections by a saliency and a plan, for trials or for good."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ..blocks.statistics import Norms, SquaredNorms, activation
from ..model.change import Change, NewWeight, Zeros
from ..model.projections import Block, ChangeOf, Projection
from .base import Saliency
from .plan import ColumnPattern, Cut, Plan, SparsityPlan, apply_cut, find_cut, mask_groups, mask_rows, sort_rows


# Projection, mask, saliency, statistic of its inputs -> mask. See [`TopUp.refine`].
Refine = Callable[[Projection, torch.Tensor, torch.Tensor, SquaredNorms | None], torch.Tensor]


def find_activations(
    projections: Sequence[Projection], norms: Norms, min_tokens: int = 1
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the activations of a block's projections by name, (in,), and the names of starved experts' projections.

    An expert with fewer than `min_tokens` tokens is starved. All its features get the root mean square activation of the
    layer's other experts, so Wanda prunes it by magnitude.
    """
    found = {p.name: activation(norms[p.name].value) for p in projections}
    experts = [p for p in projections if p.expert is not None]
    starved = [p for p in experts if norms[p.name].tokens < min_tokens]
    squares: dict[str, list[torch.Tensor]] = {}
    for projection in experts if starved else ():
        if norms[projection.name].tokens >= min_tokens:
            squares.setdefault(projection.group, []).append(found[projection.name].square().mean())
    for projection in starved:
        others = squares.get(projection.group)
        mean = torch.stack(others).mean().sqrt() if others else torch.ones((), device=projection.weight.device)
        found[projection.name] = mean.expand(projection.shape[1])
    return found, [projection.name for projection in starved]


def score_projection(
    saliency: Saliency, projection: Projection, activations: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the saliency of a projection's weights: float32, shape (out, in)."""
    own = activations.get(projection.name)
    # Copies, because a user's saliency may compute in place.
    score = saliency.score(projection.weight.to(torch.float32, copy=True), None if own is None else own.clone())
    if score.shape != projection.shape:
        raise ValueError(
            f"{type(saliency).__name__}.score returned shape {list(score.shape)} for {projection.name}: expected "
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
    """Return the changes of a block's projections by name, and the names of starved experts' projections.

    `norms` may be None if the saliency uses no activations.
    """
    activations, starved = ({}, []) if norms is None else find_activations(projections, norms, min_tokens)
    check_finite({name: torch.isfinite(values).all() for name, values in activations.items()})
    if saliency.updates_weights:
        changes = _solve(saliency, norms, activations, starved, pattern, projections, plan)
        check_finite({n: torch.isfinite(c.weight).all() for n, c in changes.items() if isinstance(c, NewWeight)})
        return changes, starved
    changes, finite = {}, {}
    for projection in projections:
        score = score_projection(saliency, projection, activations)
        mask = _mask(projection, score, plan, pattern)
        if refine is not None and projection.name not in starved:
            mask = refine(projection, mask, score, None if norms is None else norms[projection.name])
        changes[projection.name] = Zeros(mask)
        finite[projection.name] = torch.isfinite(score).all()
    check_finite(finite)
    return changes, starved


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

    Rows are ranked once for all plans. If `updates` is False, even a weight-updating saliency prunes by its score.
    """
    activations, starved = find_activations(block.pruned, norms, min_tokens)

    def score(projection: Projection) -> torch.Tensor:
        return score_projection(saliency, projection, activations)

    if saliency.updates_weights and updates:
        solve = partial(_solve, saliency, norms, activations, starved, pattern)
        return [lambda p, plan=plan: solve([p], plan)[p.name] for plan in plans]
    if len(plans) == 1 or pattern is not None:
        return [lambda p, plan=plan: Zeros(_mask(p, score(p), plan, pattern)) for plan in plans]
    cuts: dict[str, list[Cut]] = {}
    for projection in block.pruned:
        ranked = sort_rows(score(projection))
        cuts[projection.name] = [
            find_cut(ranked, plan.row_counts(projection.name, projection.shape)) for plan in plans
        ]
    return [
        lambda p, index=index, plan=plan: Zeros(apply_cut(score(p), cuts[p.name][index], plan.keeps_first))
        for index, plan in enumerate(plans)
    ]


def _solve(
    saliency: Saliency,
    norms: Norms,
    activations: Mapping[str, torch.Tensor],
    starved: Sequence[str],
    pattern: ColumnPattern | None,
    projections: Sequence[Projection],
    plan: Plan,
) -> dict[str, Change]:
    """Return the changes by a weight-updating saliency. Weights with the same input are solved together."""
    alike: dict[SquaredNorms, list[Projection]] = {}
    for projection in projections:
        alike.setdefault(norms[projection.name], []).append(projection)
    found: dict[str, Change] = {}
    for statistic, members in alike.items():
        first = members[0]
        hessian = torch.diag(activations[first.name].square()) if first.name in starved else statistic.hessian
        weights = {p.name: p.weight.to(torch.float32, copy=True) for p in members}
        dtype, shared = first.owner.dtype, first.expert is not None
        found |= saliency.solve(weights, hessian, plan.amounts, dtype, pattern, shared)
    return found


def _mask(
    projection: Projection, score: torch.Tensor, plan: SparsityPlan, pattern: ColumnPattern | None
) -> torch.Tensor:
    if pattern is not None:
        return mask_groups(score, pattern)
    return mask_rows(score, plan.row_counts(projection.name, projection.shape), plan.keeps_first)


def check_finite(finite: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` for the first projection whose tensor is False. Wait for the device only once."""
    for name, is_finite in zip(finite, torch.stack(list(finite.values())).tolist() if finite else ()):
        if not is_finite:
            raise ValueError(
                f"The saliency of {name} is not finite: load the model in bfloat16 or float32, or fix your saliency."
            )
