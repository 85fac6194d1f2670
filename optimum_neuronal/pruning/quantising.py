"""Quantises kept values of projections, and token embeddings and head. No weight is changed until the end."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..compat.accelerate import is_offloaded
from ..engine.offload import BlockLoader
from ..formats.code_checks import CODED_DTYPES, GROUP
from ..formats.codebooks import TABLES, magnitudes
from ..formats.coded import CodedWeight
from ..formats.int8_weight import Int8Weight, check_matrix
from ..model.check_model import check_changeable
from ..model.projections import Decoder, Projection
from ..model.weight_names import token_weights
from ..sparsity.masks import Change


ROWS = 1024  # at a time, whose values are compared with the rounded ones


@dataclass(frozen=True)
class Rounding:
    """The loss of quantising a projection's kept values.

    Args:
        error (`float`): squared error as a share of the sum of their squares.
        clipped (`int`): outliers, which exceed the codebook's largest value by more than its values lie apart.
    """

    error: float
    clipped: int


def check_dtypes(projections: Iterable[Projection]) -> None:
    """Raise `ValueError` if the values of a projection cannot be quantised."""
    for projection in projections:
        if projection.owner.dtype not in CODED_DTYPES:
            raise ValueError(
                f"{projection.name} has the dtype {projection.owner.dtype}: with value_bits, expected one of "
                f"{', '.join(map(str, CODED_DTYPES))}. Load the model in one of them, or leave value_bits out."
            )


def round_changes(
    decoder: Decoder, changes: Mapping[str, Change], bits: int
) -> tuple[dict[str, Change], dict[str, Rounding]]:
    """Return the codes of every weight, and the loss of quantising it. Quantised values, as of the final pass, stay.

    Args:
        decoder ([`Decoder`]): its weights are still the dense ones; none is changed.
        changes (`Mapping[str, Change]`): projection name -> what becomes of its weight.
        bits (`int`): 8, 4, 3 or 2.

    Returns:
        `tuple`: changes by projection name; losses against the dense model's values by projection name.
    """
    coded: dict[str, Change] = {}
    roundings: dict[str, Rounding] = {}
    loader = BlockLoader(decoder.blocks)
    for index in range(len(decoder.blocks)):
        with loader.loaded(index) as block, torch.no_grad():
            for projection in block.pruned:
                name, weight = projection.name, changes[projection.name].applied(projection.weight)
                found = CodedWeight.exact(weight, bits)
                if found is None:
                    found = CodedWeight.nearest(weight, bits, _table(projection, bits))
                roundings[name] = _rounding(projection.weight.masked_fill(weight == 0, 0), found)
                coded[name] = found.to(torch.device("cpu")) if is_offloaded(projection.module) else found
    return coded, roundings


def _table(projection: Projection, bits: int) -> tuple[int, ...] | None:
    """Return the codebook that experts share, since they share a weight in the files of some families."""
    return None if projection.expert is None else TABLES[bits][0]


def _rounding(weight: torch.Tensor, coded: CodedWeight) -> Rounding:
    *_, last, largest = magnitudes(coded.table.tolist())
    beyond = largest + (largest - last) / 2  # in scales: farther off than any value between two of the codebook
    total = lost = clipped = 0.0
    for values, rounded, scales in zip(*(part.split(ROWS) for part in (weight, coded.unpack(), coded.scales))):
        values, scale = values.float(), scales.float().repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
        total += values.square().sum(dtype=torch.float64).item()
        lost += (rounded.float() - values).square().sum(dtype=torch.float64).item()
        clipped += (values.abs() > scale * beyond).sum().item()
    return Rounding(lost / total if total else 0.0, int(clipped))


def check_head_structure(model: PreTrainedModel) -> None:
    """Raise `ValueError` if a model's embeddings and head, perhaps without weights yet, cannot be rounded to 8 bits."""
    found = token_weights(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has neither token embeddings nor a head: leave embedding_bits out.")
    for name, weight in found.items():
        if weight.ndim != 2 or weight.dtype not in CODED_DTYPES:
            raise ValueError(
                f"{name} has the dtype {weight.dtype} and the shape {list(weight.shape)}: with embedding_bits, expected a matrix "
                f"of one of {', '.join(map(str, CODED_DTYPES))}. Load the model in one of them, or leave embedding_bits out."
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
        try:
            check_matrix(weight)
        except ValueError as error:
            raise ValueError(f"{name} cannot be rounded to 8 bits: {error}.") from error


def round_head(
    model: PreTrainedModel, embedding_bits: int | None
) -> tuple[dict[str, Int8Weight], dict[str, dict[str, float]]]:
    """Return embeddings and head in 8 bits; change no weight.

    Args:
        model (`PreTrainedModel`): one that passed the checks.
        embedding_bits (`int`, *optional*): 8. None: nothing is rounded.

    Returns:
        `tuple`: the weights by name in the files; and for the report `error` of each, the squared error of rounding as a
            share of the squares.
    """
    weights = {} if embedding_bits is None else token_weights(model)
    rounded = {name: Int8Weight.rounded(weight) for name, weight in weights.items()}
    return rounded, {name: {"error": int8.error(weights[name])} for name, int8 in rounded.items()}


def apply_to_head(model: PreTrainedModel, rounded: dict[str, Int8Weight]) -> None:
    """Change embeddings and head, in place, to what [`round_head`] returned. Tied ones stay tied."""
    weights = token_weights(model) if rounded else {}
    with torch.no_grad():
        for name, int8 in rounded.items():
            int8.apply_to(weights[name])
