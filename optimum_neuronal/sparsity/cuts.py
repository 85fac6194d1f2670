"""Sparsity plans, the masks that follow from them, and the sparsity that a weight really has.

In this package a mask is a boolean tensor of the weight's shape (out, in), True where the weight is pruned.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


ROWS_AT_A_TIME = 64  # few enough to stay in a processor's cache
LARGE = 2**20  # weights from which on a CPU threads, counting by numpy and partitioning pay
WIDE = 1024  # columns from which partitioning finds a row's threshold faster than sorting


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
    if saliency.device.type != "cpu":
        return torch.sort(saliency.contiguous(), dim=-1).values
    ranked = np.array(saliency.numpy(), order="C")  # numpy's vectorised sort is 5 to 10 times faster than torch's
    parts = [ranked[start : start + ROWS_AT_A_TIME] for start in range(0, len(ranked), ROWS_AT_A_TIME)]
    _in_threads(lambda part: part.sort(axis=-1), parts, ranked.size)
    return torch.from_numpy(ranked)


def find_cut(sorted_rows: torch.Tensor, counts: torch.Tensor) -> Cut:
    """The cut that prunes the `counts` least salient weights of every row.

    Args:
        sorted_rows (`Tensor` of shape (out, in)): from [`sort_rows`].
        counts (`Tensor` of int64, shape (out,)): weights to prune in each row, in [0, in].
    """
    counts = counts.to(sorted_rows.device)[:, None]
    return _cut(sorted_rows.gather(1, (counts - 1).clamp(min=0)), counts)


def _cut(threshold: torch.Tensor, counts: torch.Tensor) -> Cut:
    return Cut(torch.where(counts > 0, threshold, -torch.inf), counts)


def _select_cut(saliency: torch.Tensor, counts: torch.Tensor) -> Cut:
    """The same cut as [`find_cut`] finds, on a CPU and for one plan: no row need be sorted."""
    values, positions = saliency.contiguous().numpy(), (counts - 1).clamp(min=0).numpy()
    threshold = np.empty((len(values), 1), values.dtype)

    def select(rows: np.ndarray) -> None:  # of the same count
        part, position = values[rows], positions[rows[0]]
        part.partition(position, axis=-1)
        threshold[rows, 0] = part[:, position]

    order = np.argsort(positions, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(positions[order])) + 1)
    parts = [rows[start : start + ROWS_AT_A_TIME] for rows in groups for start in range(0, len(rows), ROWS_AT_A_TIME)]
    _in_threads(select, parts, values.size)
    return _cut(torch.from_numpy(threshold), counts[:, None])


def _in_threads(function: Callable, parts: Sequence, weights: int) -> None:
    """Calls a numpy function, which lets other threads run meanwhile, on all parts, in as many threads as torch uses."""
    threads = torch.get_num_threads() if weights >= LARGE else 1
    if threads < 2:
        for part in parts:
            function(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        shares = [parts[first::threads] for first in range(threads)]
        list(pool.map(lambda share: [function(part) for part in share], shares))


def apply_cut(saliency: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The mask that a cut makes: the least salient weights of every row, equal ones in column order.

    Args:
        saliency (`Tensor` of float32, shape (out, in)): the saliency that the cut was found in.
        cut ([`Cut`]): from [`find_cut`].

    Returns:
        `Tensor`: boolean, shape (out, in), True where pruned; every row has exactly its count of True.
    """
    mask = saliency <= cut.threshold
    excess = _count_true(mask) - cut.counts
    # Few rows of a large matrix have equal saliencies at their cut. To find them would make an accelerator wait, so
    # there all rows are resolved.
    rows = excess.flatten().nonzero().flatten() if saliency.device.type == "cpu" else slice(None)
    if saliency.device.type != "cpu" or len(rows):
        tied = saliency[rows] == cut.threshold[rows]
        pruned_ties = tied.sum(dim=1, keepdim=True) - excess[rows]
        mask[rows] &= ~(tied & (tied.cumsum(dim=1, dtype=torch.int32) > pruned_ties))
    return mask


def _count_true(mask: torch.Tensor) -> torch.Tensor:
    """Of every row: int64, shape (out, 1)."""
    if mask.device.type != "cpu" or mask.numel() < LARGE:
        return mask.sum(dim=1, keepdim=True)
    return torch.from_numpy(np.count_nonzero(mask.numpy(), axis=1, keepdims=True))  # torch makes them int64 first


def prune_rows(saliency: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mask of the `counts` least salient weights of every row; equal saliencies fall in column order.

    Args:
        saliency (`Tensor` of float32, shape (out, in)): how much each weight matters; finite.
        counts (`Tensor` of int64, shape (out,)): weights to prune in each row, in [0, in].

    Returns:
        `Tensor`: boolean, shape (out, in), True where pruned.
    """
    if saliency.device.type == "cpu" and saliency.numel() >= LARGE and saliency.shape[1] >= WIDE:
        return apply_cut(saliency, _select_cut(saliency, counts))
    return apply_cut(saliency, find_cut(sort_rows(saliency), counts))


@dataclass(frozen=True)
class ColumnPattern:
    """N:M sparsity: of every `group` consecutive weights of a row, `kept` are kept. `ColumnPattern.parse("2:4")`."""

    kept: int
    group: int

    @classmethod
    def parse(cls, text: str) -> "ColumnPattern":
        """Reads `"N:M"`, N weights kept of M. Raises `ValueError` for anything else."""
        kept, _, group = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not (kept.isdecimal() and group.isdecimal() and 0 < int(kept) < int(group)):
            raise ValueError(
                f"pattern is {text!r}: expected 'N:M', N weights kept of every M, such as '2:4' or '4:8'."
            )
        return cls(int(kept), int(group))

    @property
    def sparsity(self) -> float:
        """Share of weights that are pruned."""
        return 1 - self.kept / self.group

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"


def prune_columns(saliency: torch.Tensor, pattern: ColumnPattern) -> torch.Tensor:
    """The mask of an N:M pattern: of every group of columns, the least salient weights; equal ones in column order.

    Args:
        saliency (`Tensor`, shape (out, in)): how much each weight matters; `in` is a multiple of the group.
        pattern ([`ColumnPattern`]): how many of how many are kept.

    Returns:
        `Tensor`: boolean, shape (out, in), True where pruned.
    """
    groups = saliency.reshape(len(saliency), -1, pattern.group)
    fallen = torch.sort(groups, dim=-1, stable=True).indices[..., : pattern.group - pattern.kept]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, fallen, True).view(saliency.shape)


@lru_cache
def _eight_booleans(device: torch.device) -> torch.Tensor:
    """Of every byte its eight bits as booleans, side by side in one int64: a mask is unpacked by looking its bytes up."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return bits.bool().view(torch.int64).flatten()


@dataclass(frozen=True)
class PackedMask:
    """A mask kept at one bit per weight. Make one with `PackedMask.pack(mask)`, get it back with `.unpack()`."""

    bits: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def pack(cls, mask: torch.Tensor) -> "PackedMask":
        flat = mask.flatten().to(torch.uint8)
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-(-len(flat) // 8), 8)
        bits = flat[:, 0].clone()
        for position in range(1, 8):
            bits |= flat[:, position] << position
        return cls(bits, tuple(mask.shape))

    def unpack(self, device: torch.device | None = None) -> torch.Tensor:
        """The mask, on the device of its bits or on another."""
        bits = self.bits if device is None else self.bits.to(device)
        flat = _eight_booleans(bits.device).index_select(0, bits.int()).view(torch.bool)
        return flat[: math.prod(self.shape)].view(self.shape)

    def change(self, device: torch.device | None = None) -> torch.Tensor:
        """What becomes of the weight: the mask; of a [`PackedWeight`], the new weight."""
        return self.unpack(device)


@dataclass(frozen=True)
class PackedWeight(PackedMask):
    """A sparse weight kept as its mask, one bit per weight, and the values that are not pruned, row by row."""

    values: torch.Tensor

    @classmethod
    def pack(cls, weight: torch.Tensor) -> "PackedWeight":
        pruned = weight == 0
        return cls(PackedMask.pack(pruned).bits, tuple(weight.shape), weight[~pruned])

    def change(self, device: torch.device | None = None) -> torch.Tensor:
        values = self.values if device is None else self.values.to(device)
        weight = values.new_zeros(self.shape)
        weight[~self.unpack(device)] = values
        return weight


def apply_change(weight: torch.Tensor, change: torch.Tensor) -> None:
    """Makes a weight sparse in place, by a boolean mask (True where pruned) or by the new weight itself."""
    if change.dtype == torch.bool:
        weight.masked_fill_(change, 0)
    else:
        weight.copy_(change)


def row_sparsity(weight: torch.Tensor) -> torch.Tensor:
    """Share of zeros in every row of a weight of shape (out, in): float64, shape (out,), in [0, 1]."""
    return (weight == 0).sum(dim=1).double() / weight.shape[1]
