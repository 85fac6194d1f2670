"""What all figures are drawn on: a canvas written as PNG and SVG, colours, shares in per cent, a legend."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


# Okabe and Ito's palette, distinguishable by the colour-blind. Yellow comes last: it is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#666666"
WIDTH = 8.0  # inches; at 900 pixels of a web page its text is as large as the page's
STYLE = {
    "font.size": 11,
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


def add_legend(figure, axes) -> None:
    """Below the axes, where no data can be, in as many columns as its longest name leaves room for.

    The figure becomes taller by it.
    """
    handles, labels = axes.get_legend_handles_labels()
    inches = 0.7 + 0.085 * max(map(len, labels))
    columns = max(1, min(len(labels), int(WIDTH / inches)))
    figure.set_figheight(figure.get_figheight() + 0.25 * math.ceil(len(labels) / columns))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.5, borderaxespad=0.2
    )
