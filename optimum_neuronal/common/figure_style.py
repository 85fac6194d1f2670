"""The style that all figures share. matplotlib, of the extra `report`, is imported for the first figure."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any


WIDTH = 8.0  # inches
SHEET = {  # a style sheet of matplotlib
    "font.size": 11,
    "axes.titlesize": "medium",
    "figure.titlesize": "medium",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "savefig.bbox": "tight",  # legends below the axes are in the picture
}
# Okabe and Ito's palette, then some of Tol's: color-blind readers can distinguish them.
COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#332288", "#661100",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def check_matplotlib() -> None:
    """Raise `ImportError` if figures cannot be drawn. Call it before hours of measuring."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Figures need matplotlib ({error}): pip install 'optimum-neuronal[report]'") from error


@contextmanager
def new_figure(path: str | Path, height: float, title: str) -> Iterator[Any]:
    """Yield an empty matplotlib figure, `height` inches high, and save it when the block ends.

    The user's matplotlib settings are neither used nor changed.
    """
    check_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(SHEET, after_reset=True):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle(title)
        yield figure
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def add_legend(figure, handles: Sequence) -> None:
    """Add a legend of artists with labels below the axes."""
    columns = max(1, 72 // max(8 + len(handle.get_label()) for handle in handles))
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=min(columns, 4))


def make_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the line style of each name, by order of first appearance. Forty differ in color or marker."""
    looks = zip(cycle(COLORS), cycle(MARKERS), cycle(("-", "--", "-.", ":")))
    return {
        name: {"color": color, "marker": marker, "ls": ls}
        for name, (color, marker, ls) in zip(dict.fromkeys(names), looks)
    }


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
