"""Sparsity by decoder block, method by method."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from .canvas import COLOURS, MARKERS, add_legend, check_shares, new_figure, show_percent


DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 1)), (0, (4, 1)))


def plot_block_sparsity(by_method: Mapping[str, Sequence[float]], path: str | Path) -> list[Path]:
    """Sparsity of every decoder block, one line per method.

    Args:
        by_method: method -> shares of zeros in [0, 1], one per block; of every method as many.
        path (`str` or `Path`): where to write, without a suffix.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: shares outside [0, 1], methods with different numbers of blocks; a path with a suffix or in a folder that does not exist.
    """
    check_shares(by_method)
    if len({len(shares) for shares in by_method.values()}) > 1:
        counts = ", ".join(f"{name}: {len(shares)}" for name, shares in by_method.items())
        raise ValueError(f"The methods have different numbers of blocks ({counts}).")
    with new_figure(path, 3.6) as (figure, written):
        axes = figure.subplots()
        for index, (name, shares) in enumerate(by_method.items()):
            turn, step = index % len(COLOURS), 1 + len(shares) // 16
            every = index % step, step  # markers of different lines at different blocks
            shift = (index + index // len(COLOURS)) % len(COLOURS)  # so that a colour that returns looks different
            style = {"color": COLOURS[turn], "marker": MARKERS[shift], "linestyle": DASHES[shift]}
            axes.plot(
                range(len(shares)), shares, lw=1.8, ms=6, mec="black", mew=0.4, label=name, markevery=every, **style
            )
        axes.set(xlabel="Decoder block", ylabel="Sparsity")
        axes.xaxis.get_major_locator().set_params(integer=True)
        show_percent(axes.yaxis)
        add_legend(figure, axes)
    return written
