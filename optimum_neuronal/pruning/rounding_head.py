"""Rounds token embeddings and head to 8 bits. No weight is changed."""

import torch
from transformers import PreTrainedModel

from ..compat.accelerate import is_offloaded
from ..model.weight_names import token_weights
from ..packed.formats.packed_matrix import DTYPES
from ..packed.formats.quantized import QuantizedWeight
from .check_model import check_changeable


def check_head_structure(model: PreTrainedModel) -> None:
    """Raise `ValueError` if a model's embeddings and head, perhaps without weights yet, cannot be rounded to 8 bits."""
    found = token_weights(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has neither token embeddings nor a head: leave embedding_bits out.")
    for name, weight in found.items():
        if weight.ndim != 2 or weight.dtype not in DTYPES:
            raise ValueError(
                f"{name} has the dtype {weight.dtype} and the shape {list(weight.shape)}: with embedding_bits, expected a matrix "
                f"of one of {', '.join(map(str, DTYPES))}. Load the model in one of them, or leave embedding_bits out."
            )


def check_head_weights(model: PreTrainedModel) -> None:
    """Raise `ValueError` unless embeddings and head are in memory, finite, and can be changed."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    found = token_weights(model)
    if any(module is not None and is_offloaded(module) for module in modules) or any(
        weight.is_meta for weight in found.values()
    ):
        raise ValueError(
            "embedding_bits needs token embeddings and head in memory, and some are offloaded: leave it out, and round them in "
            "the saved model, with `optimum-cli neuronal convert DIR --format packed --embedding-bits 8`."
        )
    for name, weight in found.items():
        if hasattr(weight, "device_mesh"):
            raise ValueError(f"{name} is spread over processes: load the model without tp_plan.")
        check_changeable(name, weight)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"{name} cannot be rounded to 8 bits: it holds NaN or infinity. Load the model in the dtype that it was made in."
            )


def round_head(model: PreTrainedModel, embedding_bits: int | None) -> dict[str, QuantizedWeight]:
    """Return embeddings and head of so many bits by their names in the files; change no weight.

    Args:
        model (`PreTrainedModel`): one that passed the checks.
        embedding_bits (`int`, *optional*): 8. None: nothing is rounded.
    """
    weights = {} if embedding_bits is None else token_weights(model)
    return {name: QuantizedWeight.nearest(weight, embedding_bits) for name, weight in weights.items()}


def head_errors(model: PreTrainedModel, rounded: dict[str, QuantizedWeight]) -> dict[str, dict[str, float]]:
    """Return for the report the `error` of each, the squared error of rounding as a share of the squares."""
    weights = token_weights(model) if rounded else {}
    return {name: {"error": own.error(weights[name])} for name, own in rounded.items()}
