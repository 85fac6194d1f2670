"""Sums up what packing a model has done, for the log and for the model."""

from dataclasses import dataclass, field

from torch import nn

from ..common.display import format_bytes, format_html
from ..common.notes import get_logger
from ..model.packed_modules import packed_modules


logger = get_logger(__name__)


@dataclass
class PackingSummary:
    """Summary of what `sparsify` did, as `model.packing`. `print(model.packing)` shows it as a sentence, a notebook as a table.

    Args:
        packed (`int`): packed weights, of which a mixture of experts has two.
        packed_bytes, dense_bytes (`int`): what they take, and what they would take dense, when they were packed.
        left_dense (`dict[str, str]`): projections that were left dense -> why.
        saved_packed (`bool`): whether `save_pretrained` wrote the packed format before, too.
    """

    packed: int = 0
    packed_bytes: int = 0
    dense_bytes: int = 0
    left_dense: dict[str, str] = field(default_factory=dict)
    saved_packed: bool = False

    def __str__(self) -> str:
        text = f"{self.packed} weights packed into {self.packed_bytes / 1e6:,.1f} MB instead of {self.dense_bytes / 1e6:,.1f} MB"
        if self.left_dense:
            text += "; left dense: " + ", ".join(f"{name} ({why})" for name, why in self.left_dense.items())
        return text

    def _repr_html_(self) -> str:
        rows = [
            ["packed weights", f"{self.packed:,}"],
            ["bytes packed", format_bytes(self.packed_bytes)],
            ["bytes dense", format_bytes(self.dense_bytes)],
            *([f"left dense: {name}", why] for name, why in self.left_dense.items()),
        ]
        return format_html(["", "packed model"], rows)


def summarize(model: nn.Module, left_dense: dict[str, str], saved_packed: bool) -> None:
    """Counts what a model holds packed, puts the summary on it and into the log."""
    modules = [module for _, module in packed_modules(model)]
    model.packing = PackingSummary(
        len(modules),
        sum(module.packed_bytes for module in modules),
        sum(module.dense_bytes for module in modules),
        left_dense,
        saved_packed,
    )
    logger.info(f"{type(model).__name__}: {model.packing}.")
