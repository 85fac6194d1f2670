"""Plans (the sparsity of every projection) and masks.

Masks are boolean tensors of a weight's shape (out, in), True where the weight is kept. Among equal saliencies, earlier
columns are pruned first, so a mask is a pure function of its inputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch


ROWS_AT_A_TIME = 64  # few enough to stay in a processor's cache
THREADED = 2**20  # weights from which threads and partitioning pay off on a CPU
PARTITIONED = 1024  # columns from which partitioning finds a row's threshold faster than sorting


@dataclass(frozen=True)
class Plan:
    """The share of weights to prune, in [0, 1]: full name of a projection -> number, or float64 of shape (out,), by row."""

    sparsity: Mapping[str, float | torch.Tensor]
    keeps_first: bool = False  # of equal saliencies in a row, keep earlier columns instead of later ones

    def __post_init__(self):
        for name, value in self.sparsity.items():
            value = torch.as_tensor(value)
            if not bool(((value >= 0) & (value <= 1)).all()):
                raise ValueError(f"The plan's sparsity of {name!r} leaves [0, 1]: {value.min():g} to {value.max():g}.")

    @classmethod
    def uniform(cls, names: Iterable[str], sparsity: float) -> "Plan":
        """Return the plan that gives every projection the same sparsity."""
        return cls(dict.fromkeys(names, sparsity))

    def key(self, names: Iterable[str] | None = None) -> bytes:
        """Return projections, by default all, and their sparsities as bytes."""
        chosen = self.sparsity if names is None else names
        values = ((name, torch.as_tensor(self.sparsity[name], dtype=torch.float64)) for name in chosen)
        return b"".join(name.encode() + value.numpy().tobytes() for name, value in values)


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


@dataclass(frozen=True)
class ColumnPattern:
    """N:M sparsity: in every `group` consecutive weights of a row, `kept` are kept."""

    kept: int
    group: int

    @classmethod
    def parse(cls, text: str) -> "ColumnPattern":
        """Parse a text such as `"2:4"`. Raise `ValueError` for anything else."""
        kept, _, group = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not (kept.isdecimal() and group.isdecimal() and 0 < int(kept) < int(group)):
            raise ValueError(f"pattern is {text!r}: expected 'N:M' (N of every M weights are kept), such as '2:4'.")
        return cls(int(kept), int(group))

    @property
    def sparsity(self) -> float:
        """Share of pruned weights."""
        return 1 - self.kept / self.group

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"


@dataclass(frozen=True)
class Cut:
    """The border between pruned and kept weights of every row, small enough to keep for many plans."""

    threshold: torch.Tensor  # the largest pruned saliency of each row, (out, 1); -inf if none is pruned
    counts: torch.Tensor  # pruned weights of each row, int64, (out, 1)


def sort_rows(saliency: torch.Tensor) -> torch.Tensor:
    """Return the values of every row in ascending order, float32, shape (out, in)."""
    if saliency.device.type != "cpu":
        return torch.sort(saliency.contiguous(), dim=-1).values
    ranked = np.array(saliency.numpy(), order="C")  # numpy's vectorized sort is 5 to 10 times faster than torch's
    if ranked.size < THREADED:
        ranked.sort(axis=-1)
    else:
        parts = [ranked[start : start + ROWS_AT_A_TIME] for start in range(0, len(ranked), ROWS_AT_A_TIME)]
        _in_threads(lambda part: part.sort(axis=-1), parts)
    return torch.from_numpy(ranked)


def find_cut(sorted_rows: torch.Tensor, counts: torch.Tensor) -> Cut:
    """Return the cut that prunes `counts` weights, int64 of shape (out,), of rows from [`sort_rows`]."""
    counts = counts.to(sorted_rows.device)[:, None]
    threshold = sorted_rows.gather(1, (counts - 1).clamp(min=0))
    return Cut(torch.where(counts > 0, threshold, -torch.inf), counts)


def _select_cut(saliency: torch.Tensor, counts: torch.Tensor) -> Cut:
    """Return the cut of [`find_cut`] from rows that are not sorted, on a CPU."""
    values, positions = saliency.contiguous().numpy(), (counts - 1).clamp(min=0).numpy()
    threshold = np.empty((len(values), 1), values.dtype)

    def select(rows: np.ndarray) -> None:  # of the same count
        part, position = values[rows], positions[rows[0]]
        part.partition(position, axis=-1)
        threshold[rows, 0] = part[:, position]

    order = np.argsort(positions, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(positions[order])) + 1)
    parts = [rows[start : start + ROWS_AT_A_TIME] for rows in groups for start in range(0, len(rows), ROWS_AT_A_TIME)]
    _in_threads(select, parts)
    counts = counts[:, None]
    return Cut(torch.where(counts > 0, torch.from_numpy(threshold), -torch.inf), counts)


def _in_threads(function: Callable, parts: Sequence) -> None:
    """Call a numpy function, which releases the GIL, on all parts in as many threads as torch uses."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(function, parts))


def apply_cut(saliency: torch.Tensor, cut: Cut, keeps_first: bool = False) -> torch.Tensor:
    """Return the mask of a cut through the saliency that it was found in; `keeps_first`: see [`Plan`]."""
    mask = saliency > cut.threshold
    kept = mask.sum(dim=1, keepdim=True, dtype=torch.int32)  # int64 would take ten times as long
    excess = mask.shape[1] - kept - cut.counts
    # Few rows have ties at their cut. Finding them would stall an accelerator, which resolves all rows instead.
    rows = excess.flatten().nonzero().flatten() if saliency.device.type == "cpu" else slice(None)
    if saliency.device.type != "cpu" or len(rows):
        tied = saliency[rows] == cut.threshold[rows]
        place, pruned_ties = tied.cumsum(dim=1, dtype=torch.int32), tied.sum(dim=1, keepdim=True) - excess[rows]
        mask[rows] |= tied & (place <= excess[rows] if keeps_first else place > pruned_ties)
    return mask


def mask_rows(saliency: torch.Tensor, counts: torch.Tensor, keeps_first: bool = False) -> torch.Tensor:
    """Return the mask that prunes the `counts` least salient weights, int64 of shape (out,), of each row."""
    wide = saliency.device.type == "cpu" and saliency.numel() >= THREADED and saliency.shape[1] >= PARTITIONED
    cut = _select_cut(saliency, counts) if wide else find_cut(sort_rows(saliency), counts)
    return apply_cut(saliency, cut, keeps_first)


def mask_whole(saliency: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mask that prunes the `count` least salient weights of a matrix, at most all of them, ties in row order."""
    row, count = saliency.reshape(1, -1), min(count, saliency.numel())
    threshold = smallest(row.flatten(), count) if count else row.new_full((), -torch.inf)
    cut = Cut(threshold.view(1, 1), torch.full((1, 1), count, device=row.device))
    return apply_cut(row, cut).view(saliency.shape)


def smallest(values: torch.Tensor, place: int) -> torch.Tensor:
    """Return the `place`-th smallest of values of shape (n,), counted from 1: shape (). Don't wait for an accelerator."""
    if on_cpu(values):
        return torch.from_numpy(np.partition(values.numpy(), place - 1))[place - 1]
    # CUDA finds it by histograms and does not sort.
    return values.topk(place, largest=False, sorted=False).values.amax()


def on_cpu(values: torch.Tensor) -> bool:
    return values.device.type == "cpu"


def differs_by_row(sparsity: float | torch.Tensor) -> bool:
    """Return True if a sparsity of a plan is one number per row, of shape (out,)."""
    return isinstance(sparsity, torch.Tensor) and sparsity.ndim > 0


def pruned_count(sparsity: float | torch.Tensor, shape: tuple[int, int]) -> int | torch.Tensor:
    """Return the number of weights to prune in a whole matrix, or in each row if `sparsity` is a tensor of shape (out,)."""
    if differs_by_row(sparsity):
        return row_counts(sparsity, shape)
    return int(shape[0] * shape[1] * float(sparsity) + 1e-4)


def mask_groups(saliency: torch.Tensor, pattern: ColumnPattern) -> torch.Tensor:
    """Return the mask of an N:M pattern. `in` is a multiple of M."""
    groups = saliency.reshape(len(saliency), -1, pattern.group)
    pruned = torch.sort(groups, dim=-1, stable=True).indices[..., : pattern.group - pattern.kept]
    return torch.ones_like(groups, dtype=torch.bool).scatter_(-1, pruned, False).view(saliency.shape)
