"""Changes of a weight: zeros for what a mask prunes, or a new sparse weight."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


class Change(ABC):
    """A new value of a weight of shape (out, in). [`PackedMask`] and [`PackedMatrix`] hold changes in few bytes."""

    @abstractmethod
    def apply_to(self, weight: torch.Tensor) -> None:
        """Make the weight sparse, in place."""

    @abstractmethod
    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sparse weight, of the same shape, dtype and device. The given weight stays unchanged."""


@dataclass(frozen=True)
class Zeros(Change):
    """Zeros for the pruned weights. Kept weights do not change."""

    mask: torch.Tensor  # boolean, shape (out, in), True where kept; on the weight's device

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.masked_fill_(~self.mask, 0)

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, weight, 0)  # faster than masked_fill


@dataclass(frozen=True)
class NewWeight(Change):
    """Another sparse weight, of a saliency that updates the kept weights."""

    weight: torch.Tensor  # shape (out, in), of the old weight's device and dtype

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.copy_(self.weight)

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return self.weight
