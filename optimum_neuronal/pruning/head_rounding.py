"""Rounds token embeddings and head to 8 bits, as `head_bits` asks: what is measured is what is saved."""

import torch
from transformers import PreTrainedModel

from ..formats.code_checks import CODED_DTYPES
from ..formats.int8_weight import Int8Weight, check_matrix
from ..model.checking import check_changeable
from ..model.placement import is_offloaded
from ..model.token_weights import token_weights


def check_head_structure(model: PreTrainedModel) -> None:
    """Raises `ValueError` if embeddings and head of a model, which may have no weights yet, cannot be rounded to 8 bits."""
    found = token_weights(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has neither token embeddings nor a head: leave head_bits out.")
    for name, weight in found.items():
        if weight.ndim != 2 or weight.dtype not in CODED_DTYPES:
            raise ValueError(
                f"{name} has the dtype {weight.dtype} and the shape {list(weight.shape)}: with head_bits, expected a matrix of one of "
                f"{', '.join(map(str, CODED_DTYPES))}. Load the model in one of them, or leave head_bits out."
            )


def check_head_weights(model: PreTrainedModel) -> None:
    """Raises `ValueError` unless embeddings and head are in memory, finite, and can be changed."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    found = token_weights(model)
    if any(module is not None and is_offloaded(module) for module in modules) or any(
        weight.is_meta for weight in found.values()
    ):
        raise ValueError(
            "head_bits needs token embeddings and head in memory, and some are offloaded: leave it out, and round them in the "
            "saved model, with `optimum-cli neuronal convert DIR --format packed --head-bits 8`."
        )
    for name, weight in found.items():
        if hasattr(weight, "device_mesh"):
            raise ValueError(f"{name} is spread over processes: load the model without tp_plan.")
        check_changeable(name, weight)
        try:
            check_matrix(weight)
        except ValueError as error:
            raise ValueError(f"{name} cannot be rounded to 8 bits: {error}.") from error


def round_head(
    model: PreTrainedModel, head_bits: int | None
) -> tuple[dict[str, Int8Weight], dict[str, dict[str, float]]]:
    """Embeddings and head in 8 bits; no weight is changed.

    Args:
        model (`PreTrainedModel`): that passed the checks.
        head_bits (`int`, *optional*): 8. None: nothing is rounded.

    Returns:
        `tuple`: the weights by name in the files; and for the report of each `error`, the squared error of rounding it as a
            share of its squares.
    """
    weights = {} if head_bits is None else token_weights(model)
    rounded = {name: Int8Weight.rounded(weight) for name, weight in weights.items()}
    return rounded, {name: {"error": int8.error(weights[name])} for name, int8 in rounded.items()}


def apply_to_head(model: PreTrainedModel, rounded: dict[str, Int8Weight]) -> None:
    """Changes embeddings and head to what [`round_head`] found, in place: tied ones stay tied."""
    weights = token_weights(model) if rounded else {}
    with torch.no_grad():
        for name, int8 in rounded.items():
            int8.apply_to(weights[name])
