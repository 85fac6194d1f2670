"""The layouts that packed weights are computed in: values as they are, codes of few bits, or 8 bits without a mask."""

from collections.abc import Sequence

import torch

from ..formats.coded import CodedWeight
from ..formats.int8_weight import Int8Weight
from ..formats.packed import PackedWeight
from .coded_rows import ACTIVATIONS, CodedRows
from .int8_rows import UNMASKED, Int8Rows
from .packed_rows import PackedRows


Rows = PackedRows | CodedRows | Int8Rows


def lay_out(packed: PackedWeight | CodedWeight | Int8Weight, activations: str = ACTIVATIONS[0]) -> Rows:
    """The rows of a packed matrix; `activations` counts for few bits alone. Raises `ValueError` if its parts disagree."""
    if isinstance(packed, Int8Weight):
        return Int8Rows.of(packed, activations)
    return CodedRows.of(packed, activations) if isinstance(packed, CodedWeight) else PackedRows.of(packed)


def rows_of(kind: str, tensors: Sequence[torch.Tensor], columns: int, rounded: torch.dtype | None = None) -> Rows:
    """The rows that consist of these tensors.

    Args:
        kind (`str`): `rows.kind`: `"packed"`, or what the inputs of few bits become.
        tensors (`Sequence[Tensor]`): those of `rows.names`, in that order.
        columns (`int`): of the weight.
        rounded (`torch.dtype`, *optional*): `rows.rounded`, of values of few bits.
    """
    shape = (tensors[0].shape[0], columns)
    if kind.startswith(UNMASKED):
        return Int8Rows(*tensors, shape, kind.removeprefix(UNMASKED), rounded)
    return PackedRows(*tensors, shape) if kind == PackedRows.kind else CodedRows(*tensors, shape, kind, rounded)
