"""Changes of weights as tensors, in the form that records and trials keep them in."""

from collections.abc import Mapping

import torch

from ..change import Change, Zeros
from .packed_mask import PackedMask
from .packed_matrix import PREFIX, PackedMatrix
from .quantized import QuantizedWeight
from .sparse import SparseWeight


MASK = f"{PREFIX}mask"  # what follows a weight's name, of a mask alone

StoredChange = PackedMask | PackedMatrix


def parts_of(change: Change, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Return a change of a weight as tensors, by names that begin with the given one.

    Args:
        change ([`Change`]): of the weight.
        weight (`Tensor`, shape (out, in)): dense; not changed.
        name (`str`): what the tensors are found under by [`of_parts`].
    """
    if isinstance(change, Zeros):
        return {name + MASK: PackedMask.pack(change.mask).bits}
    packed = change if isinstance(change, PackedMatrix) else SparseWeight.pack(change.applied(weight))
    return packed.parts(name)


def of_parts(
    tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int], dtype: torch.dtype
) -> StoredChange:
    """Return the change that [`parts_of`] gave tensors of.

    Args:
        tensors (`Mapping[str, Tensor]`): of this change, and perhaps of others.
        name (`str`): as it was given to [`parts_of`].
        shape (`tuple[int, int]`), dtype (`torch.dtype`): of the weight.
    """
    if name + MASK in tensors:
        return PackedMask(tensors[name + MASK], shape)
    format = _format_of(tensors, name)
    assert format is not None  # as callers of `has_parts` know
    return format.of_parts(tensors, name, shape, dtype)


def has_parts(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Return True if a change is among tensors."""
    return name + MASK in tensors or _format_of(tensors, name) is not None


def _format_of(tensors: Mapping[str, torch.Tensor], name: str) -> type[PackedMatrix] | None:
    kinds = (SparseWeight, QuantizedWeight)
    return next((kind for kind in kinds if name + PREFIX + kind.names[0] in tensors), None)
