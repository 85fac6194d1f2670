"""A summary of what was packed, for the log and for the model."""

from dataclasses import dataclass, field

from torch import nn

from ..common.display import format_bytes, format_html
from ..common.notes import get_logger
from .packed_module import packed_modules


logger = get_logger(__name__)


@dataclass
class PackingSummary:
    """What a model holds packed: `model.packing`. It prints as a sentence, and shows as a table in a notebook.

    Args:
        packed (`int`): number of packed weights; a layer of experts has two.
        packed_bytes, dense_bytes (`int`): bytes that they take packed, and would take dense.
        left_dense (`dict[str, str]`): modules that stay dense -> why.
    """

    packed: int = 0
    packed_bytes: int = 0
    dense_bytes: int = 0
    left_dense: dict[str, str] = field(default_factory=dict)

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


def summarize(model: nn.Module, left_dense: dict[str, str]) -> None:
    """Set `model.packing`, and log it."""
    modules = [module for _, module in packed_modules(model)]
    model.packing = PackingSummary(
        len(modules),
        sum(module.packed_bytes for module in modules),
        sum(module.dense_bytes for module in modules),
        left_dense,
    )
    logger.info(f"{type(model).__name__}: {model.packing}.")
