"""Changes of weights as tensors, in which records and trials keep them."""

from collections.abc import Mapping

import torch

from ..change import Change, Zeros
from .packed_mask import PackedMask
from .packed_matrix import FORMATS, PackedMatrix
from .sparse import SparseWeight


MASK = ".zeros.mask"  # follows a weight's name

StoredChange = PackedMask | PackedMatrix


def parts_of(change: Change, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Return a change of a dense weight (out, in) as tensors, by names that begin with the given one."""
    if isinstance(change, Zeros):
        return {name + MASK: PackedMask.pack(change.mask).bits}
    packed = change if isinstance(change, PackedMatrix) else SparseWeight.pack(change.applied(weight))
    stored = {part: tensor for part, tensor in packed.tensors().items() if part not in packed.derived}
    return {f"{name}.{packed.name}.{part}": tensor for part, tensor in stored.items()}


def of_parts(
    tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int], dtype: torch.dtype
) -> StoredChange:
    """Return the change that [`parts_of`] took apart, of a weight of this shape and dtype."""
    if name + MASK in tensors:
        return PackedMask(tensors[name + MASK], shape)
    for kind in map(FORMATS.get, FORMATS.names()):
        found = {part: tensors[key] for part in kind.names if (key := f"{name}.{kind.name}.{part}") in tensors}
        if found:
            return kind.of_tensors(found, shape, dtype)
    raise KeyError(name)


def has_parts(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Return True if a change is among tensors."""
    kinds = map(FORMATS.get, FORMATS.names())
    return name + MASK in tensors or any(f"{name}.{kind.name}.{kind.names[0]}" in tensors for kind in kinds)
