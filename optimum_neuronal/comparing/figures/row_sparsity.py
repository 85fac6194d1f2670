"""Heat map of the sparsity by row, projection by projection."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .canvas import add_title, check_shares, new_figure, show_percent, show_rounded


BINS = 64  # columns of the heat map
MAX_NAMES = 64  # more rows of the heat map than this are not all named


def plot_row_sparsity(
    rows: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str | None = None,
    scale: tuple[float, float] | None = None,
) -> list[Path]:
    """Heat map of the rows' sparsities: one line per projection, from the weight's first row at the left to its last.

    Args:
        rows: projection's name -> shares of zeros in [0, 1], one per row of its weight. A line has 64 cells; each is
            the mean of its share of the rows, so that projections of any size compare.
        path (`str` or `Path`): where to write, without a suffix.
        title (`str`, *optional*): what was pruned, and how.
        scale (`tuple[float, float]`, *optional*):
            The shares at the ends of the colours, so that several heat maps compare. None: the least and largest cell.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: shares outside [0, 1]; a path with a suffix or in a folder that does not exist.
    """
    check_shares(rows)
    cells = np.stack([_binned(np.asarray(shares, dtype=np.float64)) for shares in rows.values()])
    low, high = scale or (cells.min(), cells.max())
    spare = 0.005 if low == high else 0.0  # a scale needs an extent
    height = max(2.4, 1.4 + min(0.2 * len(rows), 13))
    with new_figure(path, height) as (figure, written):
        axes = figure.subplots()
        axes.grid(False)
        options = {"interpolation": "nearest", "aspect": "auto", "extent": (0, 1, len(rows), 0)}
        image = axes.imshow(cells, cmap="viridis", vmin=low - spare, vmax=high + spare, **options)
        places, names = _row_names(list(rows))
        axes.hlines(places[1:-1], 0, 1, color="white", lw=0.6)
        axes.set_yticks([(start + stop) / 2 for start, stop in zip(places, places[1:])], names)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"Position of the row in the weight (means of {BINS} bins)")
        show_percent(axes.xaxis)
        bar = figure.colorbar(image, ax=axes, aspect=4 * height, pad=0.02, label="Row sparsity")
        bar.outline.set_visible(False)
        show_rounded(bar.ax.yaxis)
        show_percent(bar.ax.yaxis)
        add_title(figure, title)
    return written


def _binned(shares: np.ndarray) -> np.ndarray:
    """Means of `BINS` bins of equal width, float64 of shape (BINS,); fewer rows than bins are repeated."""
    edges = np.arange(BINS + 1) * len(shares) / BINS
    starts = np.floor(edges[:-1]).astype(int)
    stops = np.maximum(np.ceil(edges[1:]).astype(int), starts + 1)
    return np.array([shares[start:stop].mean() for start, stop in zip(starts, stops)])


def _row_names(names: list[str]) -> tuple[list[int], list[str]]:
    """Where the heat map's named groups of lines begin, with the end of the last, and what they are called.

    A group is one projection or, if they are many, one block; if these are many as well, several.
    """
    if len(names) <= MAX_NAMES:
        return list(range(len(names) + 1)), _shortened(names)
    blocks = [match[1] if (match := re.search(r"\.(\d+)\.", name)) else name for name in names]
    starts = [index for index in range(len(names)) if index == 0 or blocks[index] != blocks[index - 1]]
    together = math.ceil(len(starts) / MAX_NAMES)
    ends = [starts[min(index + together, len(starts)) - 1] for index in range(0, len(starts), together)]
    starts = starts[::together]
    texts = [blocks[a] if a == b else f"{blocks[a]} to {blocks[b]}" for a, b in zip(starts, ends)]
    return [*starts, len(names)], [f"block {text}" if text[0].isdigit() else text for text in texts]


def _shortened(names: list[str]) -> list[str]:
    """Names without the parts that all of them begin with: "0.mlp.up_proj" of "model.layers.0.mlp.up_proj"."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(part) > shared + 2 for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
        if parts[0][shared].isdigit():  # the block's number is worth telling, even if it is the same in all
            break
    return [".".join(part[shared:]) for part in parts]
