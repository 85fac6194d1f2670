"""Changes of weights as tensors, in the form that records and trials keep them in."""

from collections.abc import Mapping

import torch

from ..sparsity.masks import Change, Zeros
from .bitmask import MASK, VALUES
from .packed import PackedMask, PackedWeight
from .quantized import CODES, QuantizedWeight
from .quantized_checks import BYTE_BITS


StoredChange = PackedMask | PackedWeight | QuantizedWeight


def parts_of(change: Change, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Return a change of a weight as tensors, by names that begin with the given one.

    Args:
        change ([`Change`]): of the weight.
        weight (`Tensor`, shape (out, in)): dense; not changed.
        name (`str`): what the tensors are found under by [`of_parts`].
    """
    if isinstance(change, Zeros):
        return {name + MASK: PackedMask.pack(change.mask).bits}
    if isinstance(change, QuantizedWeight):
        return change.parts(name)
    return PackedWeight.pack(change.applied(weight)).parts(name)


def of_parts(
    tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int], dtype: torch.dtype
) -> StoredChange:
    """Return the change that [`parts_of`] gave tensors of.

    Args:
        tensors (`Mapping[str, Tensor]`): of this change, and perhaps of others.
        name (`str`): as it was given to [`parts_of`].
        shape (`tuple[int, int]`), dtype (`torch.dtype`): of the weight.
    """
    codes = tensors.get(name + CODES)
    if codes is not None:
        bits = BYTE_BITS if codes.dtype == torch.int8 else codes.shape[2]
        return QuantizedWeight.of_parts(tensors, name, shape, bits, dtype)
    if name + VALUES in tensors:
        return PackedWeight.of_parts(tensors, name, shape)
    return PackedMask(tensors[name + MASK], shape)


def has_parts(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Return True if a change is among tensors."""
    return name + MASK in tensors or name + CODES in tensors
