"""Which weights may stay: the largest of a whole weight, of every row, or of every group of columns."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..sparsity.masks import ColumnPattern, mask_groups, mask_rows, mask_whole


NARROW = 0.05  # half-width of the window around the last threshold in which the next one is looked for
SMALL = 2**16  # weights below which the window costs more than it saves


class Support(ABC):
    """Decides by size which weights stay. A matrix may consist of several parts, each with a rule of its own."""

    @abstractmethod
    def kept(self, values: torch.Tensor) -> torch.Tensor:
        """The largest in absolute value: boolean, True where kept. Of equal ones more than allowed may be kept.

        Args:
            values (`Tensor` of shape (out, in)): what they are chosen by.
        """

    def exactly(self, values: torch.Tensor) -> torch.Tensor:
        """The same, of equal ones those of later rows and columns, so that no more are kept than allowed."""
        return self.kept(values)


class OfWhole(Support):
    """So many of a whole matrix.

    Args:
        count (`int`): how many stay.
    """

    def __init__(self, count: int):
        self.count = count
        self._threshold: float | None = None

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        sizes = values.abs()
        if self.count == 0:
            return torch.zeros_like(sizes, dtype=torch.bool)
        self._threshold = self._find_threshold(sizes.flatten())
        return sizes >= self._threshold

    def exactly(self, values: torch.Tensor) -> torch.Tensor:
        return mask_whole(values.abs(), values.numel() - self.count)

    def _find_threshold(self, sizes: torch.Tensor) -> float:
        """The smallest size that stays. It moves little between iterations, so most sizes need no sorting."""
        if self._threshold is not None and len(sizes) >= SMALL:
            low, high = self._threshold * (1 - NARROW), self._threshold * (1 + NARROW)
            inside = sizes[(sizes >= low) & (sizes < high)]
            place = self.count - int(torch.count_nonzero(sizes >= high))
            if 0 < place <= len(inside):
                return inside.kthvalue(len(inside) + 1 - place).values.item()
        return sizes.kthvalue(len(sizes) + 1 - self.count).values.item()


class OfRows(Support):
    """So many of every row.

    Args:
        counts (`Tensor` of int64, shape (out,)): how many stay in each.
    """

    def __init__(self, counts: torch.Tensor):
        self.counts = counts

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        return mask_rows(values.abs(), values.shape[1] - self.counts)


class OfGroups(Support):
    """As an N:M pattern says.

    Args:
        pattern ([`ColumnPattern`]): how many stay of how many columns.
    """

    def __init__(self, pattern: ColumnPattern):
        self.pattern = pattern

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        return mask_groups(values.abs(), self.pattern)


class OfParts(Support):
    """Matrices one below the other, each with a rule of its own.

    Args:
        supports (`Sequence[Support]`), rows (`Sequence[int]`): the rule and the number of rows of each.
    """

    def __init__(self, supports: Sequence[Support], rows: Sequence[int]):
        self.supports, self.rows = supports, list(rows)

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        parts = values.split(self.rows)
        return torch.cat([support.kept(part) for support, part in zip(self.supports, parts)])

    def exactly(self, values: torch.Tensor) -> torch.Tensor:
        parts = values.split(self.rows)
        return torch.cat([support.exactly(part) for support, part in zip(self.supports, parts)])
