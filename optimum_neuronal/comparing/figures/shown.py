"""Figures that were drawn, as a notebook shows them."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .canvas import WIDTH


@dataclass(frozen=True, repr=False)
class Figures:
    """What [`Comparison.plot`] drew: a notebook shows the figures, `images` has them as PNG.

    Args:
        images (`dict[str, bytes]`): name -> PNG.
        paths (`list[Path]`): of the files, .png and .svg; empty if none were to be kept.
    """

    images: dict[str, bytes]
    paths: list[Path]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Figures":
        """Of the files that the figures were written to, and which are not to be kept."""
        return cls({path.stem: path.read_bytes() for path in paths if path.suffix == ".png"}, [])

    def __repr__(self) -> str:
        return f"Figures({', '.join(self.images)})"

    def _repr_html_(self) -> str:
        width = round(100 * WIDTH)  # pixels
        return "\n".join(
            f'<img alt="{html.escape(name)}" width="{width}" '
            f'src="data:image/png;base64,{base64.b64encode(image).decode()}"/>'
            for name, image in self.images.items()
        )
