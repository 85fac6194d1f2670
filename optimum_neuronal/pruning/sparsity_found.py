"""The sparsity that a model has, or will have: zeros counted in its weights."""

from collections.abc import Mapping

import torch

from ..engine.offload import BlockLoader
from ..model.projections import Decoder
from ..sparsity.changes import Change
from ..sparsity.plan import row_sparsity


def measure_sparsity(
    decoder: Decoder, changes: Mapping[str, Change] | None = None
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """Counts the zeros in the weights.

    Args:
        decoder ([`Decoder`]): the model's blocks and projections.
        changes (`Mapping[str, Change]`, *optional*):
            Projection name -> what is to become of its weight: the zeros that it will have are counted. One sparse weight
            exists at a time, and none is changed.

    Returns:
        `tuple`: share of zeros in all pruned projections; by block; and by projection with its extreme rows.
    """
    projections: dict[str, dict[str, float]] = {}
    blocks: dict[str, float] = {}
    zeros = weights = 0
    loader, changes = BlockLoader(decoder.blocks), changes or {}
    for index in range(len(decoder.blocks)):
        block_zeros = block_weights = 0
        with loader.loaded(index) as block, torch.no_grad():
            for projection in block.pruned:
                change, weight = changes.get(projection.name), projection.weight
                rows = row_sparsity(weight if change is None else change.applied(weight)).cpu()
                out_features, in_features = projection.shape
                projections[projection.name] = {
                    "sparsity": rows.mean().item(),
                    "smallest_row": rows.min().item(),
                    "largest_row": rows.max().item(),
                }
                block_zeros += round((rows * in_features).sum().item())
                block_weights += out_features * in_features
        if block_weights:
            blocks[block.name] = block_zeros / block_weights
        zeros, weights = zeros + block_zeros, weights + block_weights
    return zeros / weights, blocks, projections
