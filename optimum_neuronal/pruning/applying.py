"""The last step of a prune: what was decided becomes the model's weights."""

from collections.abc import Mapping

import torch

from ..engine.offload import change_offloaded
from ..model.placement import is_offloaded
from ..model.projections import Decoder
from ..sparsity.changes import Change


def apply_changes(decoder: Decoder, changes: Mapping[str, Change]) -> None:
    """Makes the weights sparse, in place; offloaded ones whenever they are read from then on."""
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            if is_offloaded(projection.module):
                change_offloaded(projection, changes[name])
            else:
                changes[name].apply_to(projection.weight)
