"""Activations of the projections of a block, those of experts with few tokens among them."""

from collections.abc import Sequence

import torch

from ..engine.statistics import Norms, activation
from ..model.projections import Projection


def projection_activations(
    projections: Sequence[Projection], norms: Norms, min_expert_tokens: int
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Activation of the pruned projections of a block, see [`activation`].

    An expert that received fewer tokens than `min_expert_tokens` has no activation worth the name. It gets the same
    value for all its features, the root mean square of the activations of the layer's other experts: to Wanda its
    saliency is then its magnitude, on the scale of the others' saliency.

    Args:
        projections (`Sequence[Projection]`): of one block, all experts' together.
        norms (`Mapping[str, SquaredNorms]`): of all calibration sequences.
        min_expert_tokens (`int`): tokens that make an expert's activation count.

    Returns:
        `tuple`: projection name -> float32, shape (in,); and the names of those that fell back.
    """
    activations: dict[str, torch.Tensor] = {}
    starved: list[Projection] = []
    squares: dict[str, list[torch.Tensor]] = {}
    for projection in projections:
        activations[projection.name] = values = activation(norms[projection.name].value)
        if projection.expert is not None and norms[projection.name].tokens < min_expert_tokens:
            starved.append(projection)
        elif projection.expert is not None:
            squares.setdefault(projection.group, []).append(values.square().mean())
    for projection in starved:
        others = squares.get(projection.group)
        level = torch.stack(others).mean().sqrt() if others else torch.ones((), device=projection.weight.device)
        activations[projection.name] = level.expand(projection.shape[1])
    return activations, [projection.name for projection in starved]
