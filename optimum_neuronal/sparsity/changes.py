"""What becomes of a weight in a prune: some of its elements become zero, or it becomes another, sparse one.

A change is asked for nothing but to be applied, so nobody need know of which kind it is. [`packed`] has the same two
in few bytes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


class Change(ABC):
    """What becomes of a weight of shape (out, in)."""

    @abstractmethod
    def apply_to(self, weight: torch.Tensor) -> None:
        """Makes the weight sparse, in place."""

    @abstractmethod
    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        """The sparse weight, of the same shape, dtype and device; the one given stays as it is."""


@dataclass(frozen=True)
class Zeros(Change):
    """Some weights become zero, the others stay.

    Args:
        mask (`Tensor`): boolean, shape (out, in), True where pruned; on the weight's device.
    """

    mask: torch.Tensor

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.masked_fill_(self.mask, 0)

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, 0, weight)  # faster than masked_fill


@dataclass(frozen=True)
class NewWeight(Change):
    """The weight is replaced, where a saliency updates the weights that stay.

    Args:
        weight (`Tensor`): sparse, shape (out, in); on the device and in the dtype of the one that it replaces.
    """

    weight: torch.Tensor

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.copy_(self.weight)

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return self.weight
