"""The style that all figures share. matplotlib, of the extra `report`, is imported for the first figure."""

import io
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


WIDTH = 8.0  # inches; 900 pixels wide on a web page, a figure has text of the page's size
LETTER = 0.085  # inches: mean width of a letter
LINE = 0.25  # inches: height of a line of text
SHEET = {  # a style sheet of matplotlib
    "font.size": 11,
    "axes.titlesize": "medium",
    "figure.titlesize": "medium",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "legend.handlelength": 3.5,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text, for search and for screen readers
    "svg.hashsalt": "optimum-neuronal",  # without it, identifiers are random
}
# Okabe and Ito's palette, then some of Tol's: color-blind readers can distinguish them.
COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#332288", "#661100",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 1)), (0, (4, 1)))
GRAY = "#666666"

Files = dict[str, bytes]  # ".png" and ".svg" -> content


def check_matplotlib() -> None:
    """Raise `ImportError` if figures cannot be drawn. Call it before hours of measuring."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Figures need matplotlib ({error}): pip install optimum-neuronal[report]") from error


@contextmanager
def new_figure(height: float, title: str | None = None) -> Iterator[tuple[Any, Files]]:
    """Yield an empty matplotlib figure, and a dict that holds its files when the block ends.

    The height is in inches, without title and legend. The user's settings of matplotlib have no effect, and stay.
    """
    check_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    files: Files = {}
    with style.context(SHEET, after_reset=True):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        if title:
            title = wrapped(title)
            figure.suptitle(title, x=0.01, ha="left")
            figure.set_figheight(height + LINE * (1 + title.count("\n")))
        yield figure, files
        # Without date and version, so that equal data give equal files.
        for suffix, unwanted in ((".png", ("Software",)), (".svg", ("Date", "Creator"))):
            file = io.BytesIO()
            figure.savefig(file, format=suffix[1:], metadata=dict.fromkeys(unwanted))
            files[suffix] = file.getvalue()


def wrapped(text: str, inches: float = WIDTH - 0.6) -> str:
    return textwrap.fill(text, int(inches / LETTER), break_on_hyphens=False)


def add_legend(figure, handles: Sequence) -> None:
    """Add a legend of artists with labels below the axes, and make the figure taller by it."""
    handle_width = 0.7  # inches
    labels = [wrapped(handle.get_label(), WIDTH - 0.3 - handle_width) for handle in handles]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(labels), int(WIDTH / (handle_width + LETTER * longest))))
    lines = math.ceil(len(labels) / columns) if columns > 1 else sum(1 + label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + LINE * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, borderaxespad=0.2)


def make_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the line style of each name, by order of first appearance. Forty differ in color or filling."""
    looks = [
        {"color": color, "marker": marker, "ls": dash, "mfc": face or color, "mec": color if face else "black"}
        for face in (None, "white", "#cccccc", "black")
        for color, marker, dash in zip(COLORS, itertools.cycle(MARKERS), itertools.cycle(DASHES))
    ]
    return dict(zip(dict.fromkeys(names), itertools.cycle(looks)))


def show_percent(axis) -> None:
    axis.set_major_formatter(lambda share, _: f"{100 * share:.4g} %")


def show_round_numbers(axis) -> None:
    """Put at least three round numbers along an axis whose limits are final, also if it is logarithmic."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    low, high = sorted(axis.get_view_interval())
    locator: Any = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3)
    if axis.get_scale() == "log":
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        if high > 12 * low:  # a narrower range holds too few powers of ten and their multiples
            locator = LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))
    axis.set_major_locator(locator)
