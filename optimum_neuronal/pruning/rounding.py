"""Rounds the kept values of a pruned model to few bits, before its weights are changed: what is measured is what is saved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..engine.offload import BlockLoader
from ..formats.code_checks import CODED_DTYPES, GROUP
from ..formats.codebooks import TABLES, magnitudes
from ..formats.coded import CodedWeight
from ..model.placement import is_offloaded
from ..model.projections import Decoder, Projection
from ..sparsity.changes import Change


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
