"""Packs a mask of a weight's kept elements, in a bit each."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..change import Change


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a float -> its bits as a number


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

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.masked_fill_(~self.unpack(weight.device), 0)

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(self.unpack(weight.device), weight, 0)
