"""Sparsity by decoder block, method by method."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from .canvas import add_legend, add_title, check_shares, new_figure, show_percent, show_rounded
from .styles import Style, make_styles


def plot_block_sparsity(
    by_method: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str | None = None,
    styles: Mapping[str, Style] | None = None,
) -> list[Path]:
    """Sparsity of every decoder block, one line per method.

    Args:
        by_method: method -> shares of zeros in [0, 1], one per block; of every method as many.
        path (`str` or `Path`): where to write, without a suffix.
        title (`str`, *optional*): what was pruned, and how.
        styles (`Mapping[str, Style]`, *optional*): of every method, see [`make_styles`]; None: in their order.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: shares outside [0, 1], methods with different numbers of blocks; a path with a suffix or in a folder
            that does not exist.
    """
    check_shares(by_method)
    if len({len(shares) for shares in by_method.values()}) > 1:
        counts = ", ".join(f"{name}: {len(shares)}" for name, shares in by_method.items())
        raise ValueError(f"The methods have different numbers of blocks ({counts}).")
    styles = styles or make_styles(by_method)
    with new_figure(path, 3.6) as (figure, written):
        axes = figure.subplots()
        for index, (name, shares) in enumerate(by_method.items()):
            _draw(axes, index, name, shares, styles[name])
        axes.set(xlabel="Decoder block", ylabel="Sparsity")
        show_rounded(axes.yaxis)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=min(3, len(shares)))
        show_percent(axes.yaxis)
        add_title(figure, title)
        add_legend(figure, axes.lines)
    return written


def _draw(axes, index: int, name: str, shares: Sequence[float], style: Style) -> None:
    """The line of a method; `index` counts them."""
    step = 1 + len(shares) // 16
    axes.plot(
        range(len(shares)),
        shares,
        lw=1.8,
        ms=6,
        mew=0.8,
        label=name,
        color=style.colour,
        marker=style.marker,
        ls=style.dashes,
        mfc=style.face,
        mec="black" if style.face == style.colour else style.colour,
        markevery=(index % step, step),  # markers of different lines at different blocks
    )
