"""Figures of a comparison: perplexity by seconds, sparsity, lambda and other parameters, and sparsity by block.

matplotlib, of the extra `report`, is imported for the first figure.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from .results import PRESET, Result, group_by


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

PERPLEXITY, MEAN = "Perplexity (lower is better)", "Geometric mean of perplexities"
DENSE_LINE = {"color": "black", "ls": (0, (5, 2)), "lw": 1.4}
POINT = {"ls": "none", "ms": 8, "alpha": 0.8}
BLOCK_LAMBDA = "block lambda"

Lines = Mapping[str, Sequence[tuple[float, float]]]
Styles = Mapping[str, Mapping[str, Any]]  # label -> options of its line


def draw_figures(folder: Path, model: str, dense: Result, results: Sequence[Result]) -> list[Path]:
    """Draw all figures that the results of a comparison allow; return their paths. Failed results are left out."""
    # also of failed ones, so that a later run keeps them
    styles = make_styles(result.label for result in results)
    results = [result for result in results if result.error is None]
    if not results:
        return []
    paths = []
    names = ", ".join(sorted(dense.perplexity))
    title = f"{model}: {'geometric mean of perplexities' if len(dense.perplexity) > 1 else 'perplexity'} on {names}"
    if dense.perplexity and len(styles) <= len(COLORS):  # more would be hard to distinguish
        paths.append(plot_by_seconds(folder, title, dense, results, styles))
    if dense.perplexity and len({result.sparsity for result in results}) > 2:
        lines = _lines((f"{run.saliency} + {run.topup}", run.sparsity, run.mean_perplexity) for run in results)
        xlabel = "Sparsity of the pruned projections"
        paths.append(plot_lines(folder / "perplexity-by-sparsity.png", title, lines, xlabel, dense=dense))
    for (saliency, sparsity), members in group_by(results, "saliency", "sparsity").items():
        name = re.sub(r"[^\w-]+", "_", f"{saliency}-{100 * sparsity:g}")[:100] + ".png"
        title = f"{model}, {saliency}, {members[0].target}"
        lines = _lines((run.label, i, y) for run in members for i, y in enumerate(run.block_sparsity) if y is not None)
        labels = ("Decoder block", "Sparsity")
        paths.append(plot_lines(folder / f"block-sparsity-{name}", title, lines, *labels, styles=styles))
        for across, *drawn in _by_parameters(members) if dense.perplexity else ():
            paths.append(plot_lines(folder / f"perplexity-by-{across}-{name}", title, *drawn))
    return paths


def plot_by_seconds(folder: Path, title: str, dense: Result, results: Sequence[Result], styles: Styles) -> Path:
    """Draw mean perplexity by seconds: a panel per sparsity. Colors show the top-up, markers the saliency.

    With a single saliency, the seconds are the top-up's alone, as in the paper's Figure 1.
    """
    panels = list(group_by(sorted(results, key=lambda result: result.sparsity), "sparsity").values())
    markers = dict(zip(dict.fromkeys(result.saliency for result in results), cycle(MARKERS)))
    path, together = folder / "perplexity-by-seconds.png", len(markers) > 1 or PRESET in markers
    xlabel = "Seconds: allocation and pruning" if together else "Seconds of the top-up"
    with new_figure(path, 1 + 3.2 * len(panels), title) as figure:
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, members in zip(all_axes, panels):
            for run in members:
                look = styles[run.label] | POINT | {"marker": markers[run.saliency]}
                axes.plot(run.seconds if together else run.allocation_seconds, run.mean_perplexity, **look)
            axes.set_title(members[0].target, loc="left")
            axes.axhline(dense.mean_perplexity, **DENSE_LINE)
            axes.set(xlabel=xlabel, yscale="log", ylabel=PERPLEXITY)
            axes.set_xscale("symlog", linthresh=1)  # uniform sparsity takes no time to decide
            axes.xaxis.set_major_formatter("{x:g}")
            axes.margins(0.06, 0.12)
            axes.label_outer()
            show_round_numbers(axes.yaxis)
        shown = {run.label: styles[run.label] | POINT | {"marker": "o"} for run in results}
        if len(markers) > 1:
            gray = POINT | {"color": "#666666"}
            shown |= {f"saliency {name}": gray | {"marker": marker} for name, marker in markers.items()}
        shown[f"dense model: {dense.mean_perplexity:.4g}"] = DENSE_LINE
        add_legend(figure, [axes.plot([], [], label=name, **look)[0] for name, look in shown.items()])
    return path


def _lines(points: Iterable[tuple[str, float, float]]) -> Lines:
    """Return a line per name from (name, x, y), with the mean over points of the same x, for example of several seeds."""
    lines: dict[str, dict[float, list[float]]] = {}
    for name, x, y in points:
        lines.setdefault(name, {}).setdefault(x, []).append(y)
    return {name: [(x, sum(ys) / len(ys)) for x, ys in sorted(line.items())] for name, line in lines.items()}


def _numbers(result: Result) -> dict[str, float]:
    """Return the hyperparameters and swept fields of a result that are numbers, and the lambda of the block step alone."""
    values = result.config.get("topup_args", {}) | result.setting
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float)) and key != "seed"}
    if result.block_lambda is not None and result.row_lambda is None:
        numbers[BLOCK_LAMBDA] = result.block_lambda
    return numbers


def _by_parameters(results: Sequence[Result]) -> Iterator[tuple[str, Lines, str, str, Lines]]:
    """Yield a name, lines, labels of the axes and marks for every top-up with three values of a number or more."""
    for name, runs in group_by(results, "topup_name").items():
        values: dict[str, set[float]] = {}
        for key, value in chain(*(_numbers(run).items() for run in runs)):
            values.setdefault(key, set()).add(value)
        across = max(values, key=lambda key: len(values[key]), default="")
        if len(values.get(across, ())) > 2:
            lines, ylabel, marks = _across([run for run in runs if across in _numbers(run)], across)
            yield f"{name}-{across}".replace(" ", "-"), lines, f"{across} of {name}", ylabel, marks


def _across(runs: Sequence[Result], across: str) -> tuple[Lines, str, Lines]:
    """Return a line per value of the other numbers, or per test set without any, a label, and marks of chosen lambdas."""
    points: list[tuple[str, float, float]] = []
    chosen: dict[str, list[tuple[float, float]]] = {}
    ylabel = PERPLEXITY
    for run in runs:
        numbers = _numbers(run)
        x = numbers.pop(across)
        own = run.perplexity
        if numbers:
            own, ylabel = {", ".join(f"{key}={value:g}" for key, value in numbers.items()): run.mean_perplexity}, MEAN
        points += [(line, x, y) for line, y in own.items()]
        if across == BLOCK_LAMBDA and len(run.decisions["block"]["candidates"]) > 1:
            by = "reconstruction error" if "reconstruction" in run.topup else "alignment"
            chosen.setdefault(f"chosen by the {by}", []).extend((x, y) for y in own.values())
    return _lines(points), ylabel, chosen


def plot_lines(
    path: Path,
    title: str,
    lines: Lines,
    xlabel: str,
    ylabel: str = PERPLEXITY,
    marks: Lines | None = None,
    dense: Result | None = None,
    styles: Styles | None = None,
) -> Path:
    """Draw a line per name, the dense model's perplexity, and circles around points. Shares are shown in percent."""
    step = 1 + max(map(len, lines.values())) // 16
    styles = styles or make_styles(lines)
    with new_figure(path, 4.2, title) as figure:
        from matplotlib.ticker import PercentFormatter

        axes = figure.subplots()
        for index, (name, points) in enumerate(lines.items()):  # lines get markers at different points
            axes.plot(*zip(*points), label=name, ms=6, markevery=(index % step, step), **styles[name])
        for color, (name, points) in zip(COLORS[1:], (marks or {}).items()):
            axes.plot(*zip(*points), label=name, color=color, ls="none", marker="o", ms=15, mfc="none", mew=2.5)
        if dense is not None:
            axes.axhline(dense.mean_perplexity, label=f"dense model: {dense.mean_perplexity:.4g}", **DENSE_LINE)
        axes.set(xlabel=xlabel, ylabel=ylabel, yscale="linear" if ylabel == "Sparsity" else "log")
        for label, axis in ((xlabel, axes.xaxis), (ylabel, axes.yaxis)):
            show_round_numbers(axis)
            if label.startswith("Sparsity"):
                axis.set_major_formatter(PercentFormatter(1))
        add_legend(figure, axes.lines)
    return path


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
