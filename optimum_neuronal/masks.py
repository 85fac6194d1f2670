"""Sparsity plans, the masks that follow from them, and the sparsity that a weight really has.

In this package a mask is a boolean tensor of the weight's shape (out, in), True where the weight is pruned.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SparsityPlan:
    """Where the sparsity goes: the share of weights to prune, by projection, or by row of a projection.

    Args:
        sparsity (`Mapping[str, float | Tensor]`):
            Full name of a projection -> its sparsity in [0, 1], or a float64 tensor of shape (out,), one per row.
    """

    sparsity: Mapping[str, float | torch.Tensor]

    def __post_init__(self):
        for name, value in self.sparsity.items():
            value = torch.as_tensor(value)
            if not bool(((value >= 0) & (value <= 1)).all()):
                raise ValueError(f"The plan's sparsity of {name!r} leaves [0, 1]: {value.min():g} to {value.max():g}.")

    def row_counts(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """Weights to prune in every row of the projection `name`, int64, shape (out,). See [`row_counts`]."""
        return row_counts(self.sparsity[name], shape)


def row_counts(sparsity: float | torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Number of weights that each row loses.

    A row loses `floor(in * s)` weights or one more: what a row's floor leaves over is carried to the next rows, so
    the matrix as a whole is within one weight of its target.

    Args:
        sparsity (`float` or `Tensor` of shape (out,)): share of weights to prune, in [0, 1].
        shape (`tuple[int, int]`): shape (out, in) of the weight.

    Returns:
        `Tensor`: int64, shape (out,), on the CPU.
    """
    out_features, in_features = shape
    rows = torch.as_tensor(sparsity, dtype=torch.float64, device="cpu").expand(out_features)
    # The small constant absorbs rounding of the sum: 10 rows of 89.6 are 896 weights, not 895.
    total = torch.floor(torch.cumsum(rows * in_features, dim=0) + 1e-4).long()
    counts = torch.diff(total, prepend=torch.zeros(1, dtype=torch.int64))
    return counts.clamp(0, in_features)


@dataclass(frozen=True)
class Cut:
    """What separates the pruned from the kept weights of every row, small enough to keep for many plans.

    Args:
        threshold (`Tensor` of shape (out, 1)): the largest pruned saliency of each row, -inf if none is pruned.
        counts (`Tensor` of int64, shape (out, 1)): how many weights of each row are pruned.
    """

    threshold: torch.Tensor
    counts: torch.Tensor


def sort_rows(saliency: torch.Tensor) -> torch.Tensor:
    """Values of every row in ascending order, float32, shape (out, in)."""
    if saliency.device.type == "cpu":  # numpy's vectorised sort is 5 to 10 times faster than torch's there
        return torch.from_numpy(np.sort(saliency.contiguous().numpy(), axis=-1))
    return torch.sort(saliency.contiguous(), dim=-1).values


def find_cut(sorted_rows: torch.Tensor, counts: torch.Tensor) -> Cut:
    """The cut that prunes the `counts` least salient weights of every row.

    Args:
        sorted_rows (`Tensor` of shape (out, in)): from [`sort_rows`].
        counts (`Tensor` of int64, shape (out,)): weights to prune in each row, in [0, in].
    """
    counts = counts.to(sorted_rows.device)[:, None]
    threshold = sorted_rows.gather(1, (counts - 1).clamp(min=0))
    return Cut(torch.where(counts > 0, threshold, -torch.inf), counts)


def apply_cut(saliency: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The mask that a cut makes: the least salient weights of every row, equal ones in column order.

    Args:
        saliency (`Tensor` of float32, shape (out, in)): the saliency that the cut was found in.
        cut ([`Cut`]): from [`find_cut`].

    Returns:
        `Tensor`: boolean, shape (out, in), True where pruned; every row has exactly its count of True.
    """
    mask = saliency <= cut.threshold
    excess = mask.sum(dim=1, keepdim=True) - cut.counts
    # Equal saliencies are rare. Testing for them would make an accelerator wait, so there they are always resolved.
    if saliency.device.type != "cpu" or bool(excess.any()):
        tied = saliency == cut.threshold
        pruned_ties = tied.sum(dim=1, keepdim=True) - excess
        mask &= ~(tied & (tied.cumsum(dim=1, dtype=torch.int32) > pruned_ties))
    return mask


def prune_rows(saliency: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mask of the `counts` least salient weights of every row; equal saliencies fall in column order.

    Args:
        saliency (`Tensor` of float32, shape (out, in)): how much each weight matters; finite.
        counts (`Tensor` of int64, shape (out,)): weights to prune in each row, in [0, in].

    Returns:
        `Tensor`: boolean, shape (out, in), True where pruned.
    """
    return apply_cut(saliency, find_cut(sort_rows(saliency), counts))


@dataclass(frozen=True)
class PackedMask:
    """A mask kept at one bit per weight. Make one with `PackedMask.pack(mask)`, get it back with `.unpack()`, on the
    device of its bits or on another."""

    bits: torch.Tensor
    shape: tuple[int, int]

    @classmethod
    def pack(cls, mask: torch.Tensor) -> "PackedMask":
        flat = mask.flatten().to(torch.uint8)
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
        bits = flat[:, 0].clone()
        for position in range(1, 8):
            bits |= flat[:, position] << position
        return cls(bits, tuple(mask.shape))

    def to(self, device: torch.device) -> "PackedMask":
        return PackedMask(self.bits.to(device), self.shape)

    def unpack(self, device: torch.device | None = None) -> torch.Tensor:
        bits = self.bits if device is None else self.bits.to(device)
        positions = torch.arange(8, dtype=torch.uint8, device=bits.device)
        flat = ((bits[:, None] >> positions) & 1).flatten()
        return flat[: self.shape[0] * self.shape[1]].view(self.shape).bool()


def row_sparsity(weight: torch.Tensor) -> torch.Tensor:
    """Share of zeros in every row of a weight of shape (out, in): float64, shape (out,), in [0, 1]."""
    return (weight == 0).sum(dim=1).double() / weight.shape[1]
