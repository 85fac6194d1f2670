"""The layouts that packed weights are computed in: values as they are, or codes of few bits."""

from collections.abc import Sequence

import torch

from ..sparsity.coded import CodedWeight
from ..sparsity.packed import PackedWeight
from .coded_rows import ACTIVATIONS, CodedRows
from .packed_rows import PackedRows


Rows = PackedRows | CodedRows


def lay_out(packed: PackedWeight | CodedWeight, activations: str = ACTIVATIONS[0]) -> Rows:
    """The rows of a packed matrix; `activations` counts for codes alone. Raises `ValueError` if its parts disagree."""
    return CodedRows.of(packed, activations) if isinstance(packed, CodedWeight) else PackedRows.of(packed)


def rows_of(kind: str, tensors: Sequence[torch.Tensor], columns: int) -> Rows:
    """The rows that consist of these tensors.

    Args:
        kind (`str`): `rows.kind`: `"packed"`, or what the inputs of codes become.
        tensors (`Sequence[Tensor]`): those of `rows.names`, in that order.
        columns (`int`): of the weight.
    """
    shape = (tensors[0].shape[0], columns)
    return PackedRows(*tensors, shape) if kind == PackedRows.kind else CodedRows(*tensors, shape, kind)
