"""Plans: the sparsity of every projection or row, or the bits of every projection."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


DENSE = 0  # bits of a projection that is not quantized


class Plan(ABC):
    """A sparsity or a number of bits for every projection."""

    @property
    @abstractmethod
    def amounts(self) -> Mapping[str, float | torch.Tensor]:
        """Full name of a projection -> its number, or a float64 tensor of shape (out,), one per row."""

    def key(self, names: Iterable[str]) -> bytes:
        """Return the amounts of these projections as bytes."""
        values = (torch.as_tensor(self.amounts[name], dtype=torch.float64) for name in names)
        return b"".join(value.numpy().tobytes() for value in values)


@dataclass(frozen=True)
class SparsityPlan(Plan):
    """The share of weights to prune, in [0, 1]: full name of a projection -> number, or float64 of shape (out,)."""

    sparsity: Mapping[str, float | torch.Tensor]

    def __post_init__(self):
        for name, value in self.sparsity.items():
            value = torch.as_tensor(value)
            if not bool(((value >= 0) & (value <= 1)).all()):
                raise ValueError(f"The plan's sparsity of {name!r} leaves [0, 1]: {value.min():g} to {value.max():g}.")

    @property
    def amounts(self) -> Mapping[str, float | torch.Tensor]:
        return self.sparsity

    def row_counts(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return row_counts(self.sparsity[name], shape)


@dataclass(frozen=True)
class RatePlan(Plan):
    """The bits of quantized weights: full name of a projection -> 2 to 8, or `DENSE`."""

    bits: Mapping[str, int]

    @property
    def amounts(self) -> Mapping[str, int]:
        return self.bits


def row_counts(sparsity: float | torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the number of weights to prune in each row of a weight of `shape`, (out, in): int64, (out,), on the CPU.

    A row loses `floor(in * s)` weights or one more. Remainders are carried from row to row, so that the whole matrix is
    within one weight of its target.
    """
    out_features, in_features = shape
    rows = torch.as_tensor(sparsity, dtype=torch.float64, device="cpu").expand(out_features)
    # The small constant absorbs rounding errors of the sum: 10 rows of 89.6 are 896 weights, not 895.
    total = torch.floor(torch.cumsum(rows * in_features, dim=0) + 1e-4).long()
    counts = torch.diff(total, prepend=torch.zeros(1, dtype=torch.int64))
    return counts.clamp(0, in_features)


def row_sparsity(weight: torch.Tensor) -> torch.Tensor:
    """Return the share of zeros in every row of a weight of shape (out, in): float64, shape (out,), in [0, 1]."""
    return (weight == 0).sum(dim=1).double() / weight.shape[1]
