"""Changes of a weight: zeros for what a mask prunes, or a new sparse weight."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


class Change(ABC):
    """A new value of a weight of shape (out, in). [`PackedMask`] and [`PackedMatrix`] hold changes in few bytes."""

    @abstractmethod
    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sparse weight, of the same shape, dtype and device. The given weight stays unchanged."""

    def apply_to(self, weight: torch.Tensor) -> None:
        """Make the weight sparse, in place."""
        weight.copy_(self.applied(weight))


@dataclass(frozen=True)
class Zeros(Change):
    """Zeros for the pruned weights. Kept weights do not change."""

    mask: torch.Tensor  # boolean, shape (out, in), True where kept; on the weight's device

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, weight, 0)  # faster than masked_fill


@dataclass(frozen=True)
class NewWeight(Change):
    """Another sparse weight, of a saliency that updates the kept weights."""

    weight: torch.Tensor  # shape (out, in), of the old weight's device and dtype

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return self.weight


@lru_cache
def _eight_booleans(device: torch.device) -> torch.Tensor:
    """Return a table: byte -> its eight bits as booleans in one int64. A mask is unpacked by looking up its bytes."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return bits.bool().view(torch.int64).flatten()


@dataclass(frozen=True)
class PackedMask(Change):
    """A mask of a weight's kept elements. As a change, it sets the others to zero.

    `bits`, uint8, shape (ceil(numel / 8),): element `i` in row-major order is bit `i % 8`, from the lowest, of byte
    `i // 8`, 1 where kept and 0 after the end.
    """

    bits: torch.Tensor
    shape: tuple[int, ...]  # of the weight

    @classmethod
    def pack(cls, kept: torch.Tensor) -> "PackedMask":
        """Pack a boolean tensor, True where kept, on its device."""
        flat = kept.flatten()
        if kept.device.type == "cpu":
            return cls(torch.from_numpy(np.packbits(flat.numpy(), bitorder="little")), tuple(kept.shape))
        flat = torch.nn.functional.pad(flat.to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
        bits = flat[:, 0].clone()
        for position in range(1, 8):
            bits |= flat[:, position] << position
        return cls(bits, tuple(kept.shape))

    def unpack(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the mask as booleans, True where kept, on the device of the bits or on another."""
        bits = self.bits if device is None else self.bits.to(device)
        flat = _eight_booleans(bits.device).index_select(0, bits.int()).view(torch.bool)
        return flat[: math.prod(self.shape)].view(self.shape)

    def to(self, device: torch.device) -> "PackedMask":
        """Return this mask on another device."""
        return PackedMask(self.bits.to(device), self.shape)

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(self.unpack(weight.device), weight, 0)
