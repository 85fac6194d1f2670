"""What all figures are drawn on: a canvas written as PNG and SVG, a title, shares in per cent, a legend."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


WIDTH = 8.0  # inches; at 900 pixels of a web page its text is as large as the page's
LETTER = 0.085  # inches: the width of one, on average
LINE = 0.25  # inches: the height of a line of the legend
STYLE = {
    "font.size": 11,
    "axes.titlesize": "medium",  # as large as the labels of the axes
    "figure.titlesize": "medium",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "optimum-neuronal",  # otherwise ids are drawn by chance
}


def check_matplotlib() -> None:
    """Raises `ImportError` if figures cannot be drawn: to find that out before hours of measuring, not afterwards."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Figures need matplotlib ({error}): pip install optimum-neuronal[report]") from error


@contextmanager
def new_figure(path: str | Path, height: float) -> Iterator[tuple[Any, list[Path]]]:
    """An empty figure; at the end it is written, and the list holds its two files. Nothing global stays changed.

    Args:
        path (`str` or `Path`): where to write, without a suffix.
        height (`float`): in inches.
    """
    path = Path(path)
    if path.suffix and not path.suffix[1:].isdigit():  # "wanda-0.7" has none
        raise ValueError(
            f"The path {str(path)!r} ends in {path.suffix!r}: leave it out, since .png and .svg are added."
        )
    if not path.parent.is_dir():
        raise ValueError(f"The folder {str(path.parent)!r} does not exist: make it first.")
    check_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written: list[Path] = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, written
        # Without the date and the version, so that equal data give equal files.
        for suffix, unwanted in ((".png", ("Software",)), (".svg", ("Date", "Creator"))):
            target = path.with_name(path.name + suffix)
            figure.savefig(target, metadata=dict.fromkeys(unwanted))
            written.append(target)


def check_shares(series: Mapping[str, Sequence[float]]) -> None:
    """Raises `ValueError` unless there is something to draw, and all of it lies in [0, 1]."""
    if not series:
        raise ValueError("There is nothing to draw: give at least one series of sparsities.")
    for name, shares in series.items():
        if len(shares) == 0:
            raise ValueError(f"{name!r} has no sparsities.")
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"{name!r} has sparsities outside [0, 1].")


def show_percent(axis, digits: int = 4) -> None:
    """Writes the shares along an axis in per cent."""
    axis.set_major_formatter(lambda share, _: f"{100 * share:.{digits}g} %")


def show_rounded(axis) -> None:
    """Puts at least three ticks at round numbers along a linear axis."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))


def add_title(figure, text: str | None) -> None:
    """Above the axes, from the left, on as many lines as it needs, by which the figure becomes taller; None: none."""
    if text:
        text = wrapped(text)
        figure.set_figheight(figure.get_figheight() + 0.22 * (1 + text.count("\n")))
        figure.suptitle(text, x=0.01, ha="left")


def wrapped(text: str, inches: float = WIDTH - 0.6) -> str:
    """A text on lines of this width at most."""
    return textwrap.fill(text, int(inches / LETTER), break_on_hyphens=False)


def add_legend(figure, handles: Sequence) -> None:
    """Below the axes, where no data can be, in as many columns as its longest name leaves room for.

    The figure becomes taller by it.

    Args:
        figure: of matplotlib.
        handles: lines, bars and the like, with a label each.
    """
    beside = 0.7  # inches of a handle
    labels = [wrapped(handle.get_label(), WIDTH - 0.3 - beside) for handle in handles]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(labels), int(WIDTH / (beside + LETTER * longest))))
    lines = math.ceil(len(labels) / columns) if columns > 1 else sum(1 + label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + LINE * lines)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3.5,
        borderaxespad=0.2,
    )
