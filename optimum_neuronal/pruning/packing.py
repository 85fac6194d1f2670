"""Put the quantized weights that a prune found into its model, as packed modules."""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat.accelerate import is_offloaded
from ..model.projections import Decoder
from ..model.weight_names import token_weights
from ..packed.formats.packed_matrix import DTYPES
from ..packed.formats.quantized import QuantizedWeight
from ..packed.packed_embedding import is_embedding, is_head
from ..packed.packed_module import packed_modules
from ..packed.replacing import has_own_forward, packable_paths, put_packed
from ..packed.sparsify import finish_packing


def check_quantizable(decoder: Decoder, loaded: bool = True) -> None:
    """Raise `ValueError` for a projection that cannot be quantized.

    Args:
        decoder ([`Decoder`]): of the model.
        loaded (`bool`): False if the weights are still on the meta device.
    """
    for name, projection in decoder.projections.items():
        module, dtype = projection.module, projection.owner.dtype
        if dtype not in DTYPES:
            raise ValueError(
                f"{name} has dtype {dtype}: with bits_per_weight, expected {', '.join(map(str, DTYPES))}."
            )
        if loaded and is_offloaded(module):
            raise ValueError(
                f"bits_per_weight needs the weights in memory, but those of {name} are offloaded: load the model without "
                "device_map, and prune without --stream."
            )
        if not packable_paths(module, name) or has_own_forward(module):
            raise ValueError(
                f"{name} cannot be quantized: a {type(module).__name__} "
                f"{'whose forward was replaced ' if has_own_forward(module) else ''}has no packed form. Leave it out with "
                f"ignore=['{name.split('.')[-1 if projection.expert is None else -3]}']."
            )


def round_head(model: PreTrainedModel, embedding_bits: int | None) -> dict[str, QuantizedWeight]:
    """Return token embeddings and head rounded to 8 bits, by their names in the files; none if `embedding_bits` is None."""
    weights = {} if embedding_bits is None else token_weights(model)
    return {name: QuantizedWeight.nearest(weight, embedding_bits) for name, weight in weights.items()}


def head_errors(model: PreTrainedModel, rounded: Mapping[str, QuantizedWeight]) -> dict[str, dict[str, float]]:
    """Return for the report the squared error of rounding each, as a share of its squares."""
    weights = token_weights(model) if rounded else {}
    return {name: {"error": own.error(weights[name])} for name, own in rounded.items()}


def put_quantized(
    model: PreTrainedModel,
    decoder: Decoder,
    weights: Mapping[str, QuantizedWeight],
    head: Mapping[str, QuantizedWeight],
) -> None:
    """Make a model compute with quantized weights, in place.

    Args:
        model (`PreTrainedModel`): other projections stay as they are.
        decoder ([`Decoder`]): of the model.
        weights (`Mapping[str, QuantizedWeight]`):
            Projection name -> its weight, shape (out, in). All experts of a layer have the same bits and no steps.
        head (`Mapping[str, QuantizedWeight]`):
            Name in the files -> weight of token embeddings or head. A module without a packed form gets the rounded
            numbers dense.
    """
    _put_head(model, head)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, list[QuantizedWeight]] = {}
    for name, projection in decoder.projections.items():
        if name in weights:
            path = names[id(projection.module)]
            path = path if projection.expert is None else f"{path}.{projection.parameter}"
            found.setdefault(path, []).append(weights[name])
    for path, parts in found.items():
        put_packed(model, path, QuantizedWeight.joined(parts))
    if next(packed_modules(model), None) is not None:
        finish_packing(model)


def _put_head(model: PreTrainedModel, head: Mapping[str, QuantizedWeight]) -> None:
    by_weight = {id(weight): head[name] for name, weight in token_weights(model).items() if name in head}
    modules = {name: m for name, m in model.named_modules() if id(getattr(m, "weight", None)) in by_weight}
    for key, matrix in by_weight.items():
        sharing = {name: module for name, module in modules.items() if id(module.weight) == key}
        if all(_has_packed_form(module) for module in sharing.values()):
            path = next((name for name, m in sharing.items() if isinstance(m, nn.Embedding)), next(iter(sharing)))
            put_packed(model, path, matrix)
        else:
            with torch.no_grad():
                next(iter(sharing.values())).weight.copy_(matrix.unpack())


def _has_packed_form(module: nn.Module) -> bool:
    return (is_embedding(module) or is_head(module)) and not has_own_forward(module)
