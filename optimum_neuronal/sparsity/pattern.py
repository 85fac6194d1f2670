"""N:M sparsity, the pattern that sparse tensor cores compute with: so many weights kept of every few."""

from dataclasses import dataclass

import torch


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
