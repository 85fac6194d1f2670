"""Sparse weights in few bytes: which elements are kept, one bit each, and the values of those that are.

The records of an unfinished prune, offloaded weights and the files of packed checkpoints hold weights in this form.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..sparsity.masks import Change
from .bitmask import INTEGERS, MASK, VALUES, mask_length, pack, unpack


@lru_cache
def _eight_booleans(device: torch.device) -> torch.Tensor:
    """Of every byte its eight bits as booleans, side by side in one int64: a mask is unpacked by looking its bytes up."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return bits.bool().view(torch.int64).flatten()


@dataclass(frozen=True)
class PackedMask(Change):
    """Which elements of a weight are kept; as a change, the others become zero.

    Args:
        bits (`Tensor`): uint8, shape (ceil(numel / 8),): element `i` in row-major order is bit `i % 8`, from the lowest,
            of byte `i // 8`, 1 where kept and 0 behind the end.
        shape (`tuple[int, ...]`): of the weight.
    """

    bits: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def pack(cls, kept: torch.Tensor) -> "PackedMask":
        """Packs a boolean tensor, True where kept, on its device."""
        flat = kept.flatten()
        if kept.device.type == "cpu":
            return cls(torch.from_numpy(np.packbits(flat.numpy(), bitorder="little")), tuple(kept.shape))
        flat = torch.nn.functional.pad(flat.to(torch.uint8), (0, -len(flat) % 8)).view(mask_length(len(flat)), 8)
        bits = flat[:, 0].clone()
        for position in range(1, 8):
            bits |= flat[:, position] << position
        return cls(bits, tuple(kept.shape))

    def unpack(self, device: torch.device | None = None) -> torch.Tensor:
        """The mask as booleans, True where kept, on the device of the bits or on another."""
        bits = self.bits if device is None else self.bits.to(device)
        flat = _eight_booleans(bits.device).index_select(0, bits.int()).view(torch.bool)
        return flat[: math.prod(self.shape)].view(self.shape)

    def to(self, device: torch.device) -> "PackedMask":
        """This mask on another device."""
        return PackedMask(self.bits.to(device), self.shape)

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.masked_fill_(~self.unpack(weight.device), 0)

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(self.unpack(weight.device), weight, 0)


@dataclass(frozen=True)
class PackedWeight(Change):
    """A sparse weight; as a change, it takes the place of another.

    Kept is what has any bit set: a weight comes back bit-equal, with -0.0 and NaN.

    Args:
        mask ([`PackedMask`]): which elements are kept.
        values (`Tensor`): those, in row-major order, shape (kept,), of the weight's dtype, on the mask's device.
    """

    mask: PackedMask
    values: torch.Tensor

    @classmethod
    def pack(cls, weight: torch.Tensor) -> "PackedWeight":
        """Packs a weight of any shape and floating dtype, on its device."""
        if weight.device.type == "cpu":
            bits, values = pack(weight)
            return cls(PackedMask(bits, tuple(weight.shape)), values)
        kept = weight.contiguous().view(INTEGERS[weight.element_size()]) != 0
        return cls(PackedMask.pack(kept), weight[kept])

    @classmethod
    def of_parts(cls, tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> "PackedWeight":
        """The weight of what [`PackedWeight.parts`] gave under a name."""
        return cls(PackedMask(tensors[name + MASK], shape), tensors[name + VALUES])

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """Mask and values, as they are recorded under a name."""
        return {name + MASK: self.mask.bits, name + VALUES: self.values}

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.mask.shape

    @property
    def nbytes(self) -> int:
        """Bytes that mask and values take together."""
        return self.mask.bits.nbytes + self.values.nbytes

    def unpack(self, device: torch.device | None = None) -> torch.Tensor:
        """The weight, on the device of its values or on another."""
        values = self.values if device is None else self.values.to(device)
        if values.device.type == "cpu":
            return unpack(self.mask.bits.cpu(), values, self.shape)
        weight = values.new_zeros(self.shape)
        weight[self.mask.unpack(values.device)] = values
        return weight

    def to(self, device: torch.device) -> "PackedWeight":
        """This weight on another device."""
        return PackedWeight(self.mask.to(device), self.values.to(device))

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.copy_(self.unpack(weight.device))

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return self.unpack(weight.device)
