"""Zeros in weights, which make a model sparse whatever its config says."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from ..compat import hf_private
from .change import Change
from .find_blocks import count_packed, find_all_projections
from .projections import Decoder, by_owner
from .sparsity_config import Sparsity, describe_sparsity, read_sparsity_config


# A model is sparse if a larger share of its projections' weights is zero. Models that were quantized to 4 bits and back have
# less: measured up to 20%, which depends on the grid.
SPARSE = 0.25


def is_zero(weight: torch.Tensor) -> torch.Tensor:
    """Return booleans of a weight's shape, True where it is 0.0 or -0.0."""
    return (weight.float() if weight.itemsize == 1 else weight) == 0  # torch does not compare float8


@torch.no_grad()
def measure_sparsity(decoder: Decoder, changes: Mapping[str, Change] | None = None) -> Sparsity:
    """Return the shares of zeros, with `changes` made, in the projections to prune. Offloaded weights are read."""
    changes = changes or {}
    projections: dict[str, dict[str, float]] = {}
    zeros: dict[str, int] = {}
    for block in decoder.blocks:
        for first, *others in by_owner(block.pruned):
            owner = first.owner.data
            if hf_private.is_offloaded(first.module):
                owner = hf_private.offload_hook(first.module).weights_map[first.parameter]
            for projection in (first, *others):
                change, weight = changes.get(projection.name), projection.view(owner)
                counts = is_zero(weight if change is None else change.applied(weight)).sum(dim=1).cpu()
                rows = counts.double() / projection.shape[1]
                projections[projection.name] = {
                    "sparsity": rows.mean().item(),
                    "smallest_row": rows.min().item(),
                    "largest_row": rows.max().item(),
                }
                zeros[block.name] = zeros.get(block.name, 0) + int(counts.sum())
    blocks = {block.name: zeros[block.name] / block.numel for block in decoder.blocks if block.pruned}
    return Sparsity(sum(zeros.values()) / sum(block.numel for block in decoder.blocks), blocks, projections)


def find_sparsity_config(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return the `sparsity_config` of a model, or a new one that counts its zeros.

    None: the model is dense, or its weights cannot be counted.
    """
    recorded = read_sparsity_config(model.config)
    if recorded is not None or count_packed(model) or hf_private.is_quantized(model):
        return recorded
    with suppress(ValueError):  # no list of blocks is found
        decoder = find_all_projections(model)
        found = measure_sparsity(decoder)
        if found.achieved > SPARSE:
            return describe_sparsity(decoder, found)
    return None
