"""Changes of a projection's weight: zeros for what a mask prunes, or a new sparse weight."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


class Change(ABC):
    """A new value of a weight of shape (out, in)."""

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
class PackedMask:
    """A boolean mask of a weight's kept elements, packed into bits.

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


@dataclass(frozen=True)
class PackedChange(Change):
    """A change in few bytes: the mask as bits and, if the kept weights are new, their values in row-major order."""

    mask: PackedMask
    values: torch.Tensor | None = None  # shape (kept,), of the weight's dtype

    @classmethod
    def pack(cls, change: Change, weight: torch.Tensor) -> "PackedChange":
        """Pack the change of a dense weight, (out, in)."""
        if isinstance(change, Zeros):
            return cls(PackedMask.pack(change.mask))
        changed = change.applied(weight)
        kept = changed != 0
        return cls(PackedMask.pack(kept), changed[kept])

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        kept = self.mask.unpack(weight.device)
        if self.values is None:
            return torch.where(kept, weight, 0)
        changed = torch.zeros(self.mask.shape, dtype=weight.dtype, device=weight.device)
        return changed.masked_scatter_(kept, self.values.to(weight))

    def to(self, device: torch.device) -> "PackedChange":
        """Return this change on another device."""
        mask = PackedMask(self.mask.bits.to(device), self.mask.shape)
        return PackedChange(mask, None if self.values is None else self.values.to(device))

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors for a record, by names that begin with the projection's."""
        values = {} if self.values is None else {f"{name}.values": self.values}
        return {f"{name}.mask": self.mask.bits, **values}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int]) -> "PackedChange":
        """Return the change of a projection of this shape from the tensors of a record."""
        return cls(PackedMask(tensors[f"{name}.mask"], shape), tensors.get(f"{name}.values"))


def row_stride(columns: int) -> int:
    """Return the bytes of a row's mask, which begins at a whole word of 64 bits."""
    return 8 * -(-columns // 64)


def packed_bytes(shape: Sequence[int], kept: int, itemsize: int) -> int:
    """Return the bytes of a packed weight in a file (docs/format.md): a bit per element, in words of 64, and the kept values."""
    return math.prod(shape[:-1]) * row_stride(shape[-1]) + kept * itemsize
