"""Quantises the kept values of projections, and token embeddings and head, before a weight is changed."""

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
    """What rounding did to the kept values of a projection.

    Args:
        error (`float`): squared error as a share of the sum of their squares.
        clipped (`int`): values beyond the largest level of their group's scale by more than the levels lie apart: outliers
            that no scale holds together with the other values.
    """

    error: float
    clipped: int


def check_dtypes(projections: Iterable[Projection]) -> None:
    """Raises `ValueError` if the values of a projection cannot be rounded to few bits."""
    for projection in projections:
        if projection.owner.dtype not in CODED_DTYPES:
            raise ValueError(
                f"{projection.name} has the dtype {projection.owner.dtype}: with value_bits, expected one of "
                f"{', '.join(map(str, CODED_DTYPES))}. Load the model in one of them, or leave value_bits out."
            )


def round_changes(
    decoder: Decoder, changes: Mapping[str, Change], bits: int
) -> tuple[dict[str, Change], dict[str, Rounding]]:
    """What becomes of every weight, with kept values of few bits; values that are such already stay as they are.

    That they are the final pruning has seen to, as it finds weights; here is told what that did.

    Args:
        decoder ([`Decoder`]): whose weights are still the dense ones; none is changed.
        changes (`Mapping[str, Change]`): projection name -> what becomes of its weight.
        bits (`int`): 8, 4, 3 or 2.

    Returns:
        `tuple`: changes by projection name; what rounding did to the dense model's values of each.
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
    """Experts share a weight in the files of some families, and so a table of levels."""
    return None if projection.expert is None else TABLES[bits][0]


def _rounding(weight: torch.Tensor, coded: CodedWeight) -> Rounding:
    levels = magnitudes(coded.table.tolist())
    beyond = levels[-1] + (levels[-1] - levels[-2]) / 2  # in scales: farther from a level than any value between two
    total = lost = clipped = 0.0
    for values, rounded, scales in zip(*(part.split(ROWS) for part in (weight, coded.unpack(), coded.scales))):
        values, scale = values.float(), scales.float().repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
        total += values.square().sum(dtype=torch.float64).item()
        lost += (rounded.float() - values).square().sum(dtype=torch.float64).item()
        clipped += (values.abs() > scale * beyond).sum().item()
    return Rounding(lost / total if total else 0.0, int(clipped))


def check_head_structure(model: PreTrainedModel) -> None:
    """Raises `ValueError` if embeddings and head of a model, which may have no weights yet, cannot be rounded to 8 bits."""
    found = token_weights(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has neither token embeddings nor a head: leave embedding_bits out.")
    for name, weight in found.items():
        if weight.ndim != 2 or weight.dtype not in CODED_DTYPES:
            raise ValueError(
                f"{name} has the dtype {weight.dtype} and the shape {list(weight.shape)}: with embedding_bits, expected a matrix of one of "
                f"{', '.join(map(str, CODED_DTYPES))}. Load the model in one of them, or leave embedding_bits out."
            )


def check_head_weights(model: PreTrainedModel) -> None:
    """Raises `ValueError` unless embeddings and head are in memory, finite, and can be changed."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    found = token_weights(model)
    if any(module is not None and is_offloaded(module) for module in modules) or any(
        weight.is_meta for weight in found.values()
    ):
        raise ValueError(
            "embedding_bits needs token embeddings and head in memory, and some are offloaded: leave it out, and round them in the "
            "saved model, with `optimum-cli neuronal convert DIR --format packed --embedding-bits 8`."
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
    """Embeddings and head in 8 bits; no weight is changed.

    Args:
        model (`PreTrainedModel`): that passed the checks.
        embedding_bits (`int`, *optional*): 8. None: nothing is rounded.

    Returns:
        `tuple`: the weights by name in the files; and for the report of each `error`, the squared error of rounding it as a
            share of its squares.
    """
    weights = {} if embedding_bits is None else token_weights(model)
    rounded = {name: Int8Weight.rounded(weight) for name, weight in weights.items()}
    return rounded, {name: {"error": int8.error(weights[name])} for name, int8 in rounded.items()}


def apply_to_head(model: PreTrainedModel, rounded: dict[str, Int8Weight]) -> None:
    """Changes embeddings and head to what [`round_head`] found, in place: tied ones stay tied."""
    weights = token_weights(model) if rounded else {}
    with torch.no_grad():
        for name, int8 in rounded.items():
            int8.apply_to(weights[name])
