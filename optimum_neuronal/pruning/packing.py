"""What was quantised takes its place in the model: as packed modules, which another room has."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..formats.quantized import QuantizedWeight
from ..model.projections import Decoder
from ..model.weight_names import token_weights
from ..sparsity.masks import Change


class Packing(NamedTuple):
    """How packed modules take the place of dense ones. This room knows no modules.

    Args:
        put_quantized: model, decoder, projection name -> its quantised weight.
        put_head: model, name in the files -> the quantised weight of embeddings or head.
    """

    put_quantized: Callable[[PreTrainedModel, Decoder, Mapping[str, QuantizedWeight]], None]
    put_head: Callable[[PreTrainedModel, Mapping[str, QuantizedWeight]], None]


def quantized_weights(decoder: Decoder, changes: Mapping[str, Change]) -> dict[str, QuantizedWeight]:
    """Return the quantised weights among changes, by projection name.

    The experts of a layer, which share a parameter, are one weight of shape (experts, out, in), under the name of their
    group, see [`Projection.group`].
    """
    found: dict[str, list[QuantizedWeight]] = {}
    stacks = set()
    for name, projection in decoder.projections.items():
        change = changes[name]
        if isinstance(change, QuantizedWeight):
            found.setdefault(projection.group or name, []).append(change)
            stacks.add(projection.group)
    return {name: _stacked(parts) if name in stacks else parts[0] for name, parts in found.items()}


def _stacked(parts: list[QuantizedWeight]) -> QuantizedWeight:
    return replace(QuantizedWeight.joined(parts), shape=(len(parts), *parts[0].shape))


def _put_quantized(model: PreTrainedModel, decoder: Decoder, weights: Mapping[str, QuantizedWeight]) -> None:
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            own = weights[projection.group or name]
            if projection.expert is not None:
                rows = projection.shape[0]
                own = own.rows(projection.expert * rows, (projection.expert + 1) * rows)
            own.apply_to(projection.weight)


def _put_head(model: PreTrainedModel, weights: Mapping[str, QuantizedWeight]) -> None:
    found = token_weights(model)
    with torch.no_grad():
        for name, own in weights.items():
            own.apply_to(found[name])


# As dense weights, until modules with codes are there.
IN_PLACE = Packing(_put_quantized, _put_head)
