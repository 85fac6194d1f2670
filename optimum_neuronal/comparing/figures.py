"""Figures of a comparison: perplexity by seconds, sparsity, lambda and other parameters, and sparsity by block.

matplotlib, of the extra `report`, is imported for the first figure.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ..common.validation import check_choice, require_extra
from .results import PRESET, Result, group_by


WIDTH = 8.0  # inches
SHEET = {  # a style sheet of matplotlib
    "font.size": 11,
    "axes.titlesize": "medium",
    "figure.titlesize": "medium",
    "axes.grid": True,
    "axes.grid.which": "both",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "xtick.minor.size": 3.5,  # as the major ones
    "ytick.minor.size": 3.5,
    "savefig.dpi": 150,
    "savefig.bbox": "tight",  # legends below the axes are in the picture
}
# Okabe and Ito's palette, then some of Tol's: color-blind readers can distinguish them.
COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#332288", "#661100",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (8, 3)))
MOST_LINES = 8  # in a figure

PERPLEXITY, MEAN = "Perplexity (lower is better)", "Geometric mean of perplexities"
SHARE = "Sparsity"  # of this axis and of the x axis "Sparsity of ...", in percent
DENSE_LINE = {"color": "black", "ls": (0, (5, 2)), "lw": 1.4}
SECONDS = {"value": "symlog", "linthresh": 1, "subs": (2, 5)}  # uniform sparsity takes no time to decide
BLOCK_LAMBDA = "block lambda"

Points = Iterable[tuple[str, float, float]]  # a line's name, x and y; several y at one x are those of several seeds
Styles = Mapping[str, Mapping[str, Any]]  # name -> options of the line


def draw_figures(
    folder: Path, model: str, dense: Result, results: Sequence[Result], asked: Sequence[str] = ()
) -> list[Path]:
    """Draw all figures that the results of a comparison allow; return their paths. Failed results are left out.

    Each has at most eight lines, see [`best_lines`].
    """
    check_lines(asked, results)
    found, paths = [result for result in results if result.error is None], []
    if found and dense.perplexity:
        drawn, left_out = best_lines(found, asked)
        measure = "geometric mean of perplexities" if len(dense.perplexity) > 1 else "perplexity"
        title = f"{model}: {measure} on {', '.join(sorted(dense.perplexity))}{left_out}"
        styles = make_styles(results)  # also of failed ones, so that a later run keeps them
        paths.append(plot_by_seconds(folder / "perplexity-by-seconds.png", title, drawn, styles, dense))
        if len({run.sparsity for run in drawn}) > 2:
            points = [(run.methods, run.sparsity, run.mean_perplexity) for run in drawn]
            labels = f"{SHARE} of the pruned projections", PERPLEXITY
            paths.append(plot(folder / "perplexity-by-sparsity.png", title, {"": points}, styles, *labels, dense))
    for (saliency, sparsity), members in group_by(found, "saliency", "sparsity").items():
        name = re.sub(r"[^\w-]+", "_", f"{saliency}-{100 * sparsity:g}")[:100] + ".png"
        title, (drawn, left_out) = f"{model}, {saliency}, {members[0].target}", best_lines(members, asked)
        points = [(run.methods, i, y) for run in drawn for i, y in enumerate(run.block_sparsity) if y is not None]
        given = {"": points}, make_styles(members), "Decoder block", SHARE
        paths.append(plot(folder / f"block-sparsity-{name}", title + left_out, *given))
        for topup, runs in group_by(members, "topup_name").items() if dense.perplexity else ():
            paths += plot_swept(folder, name, title, topup, runs)
    return paths


def check_lines(asked: Sequence[str], results: Sequence[Result]) -> None:
    """Raise `ValueError` for a line that no result belongs to."""
    known = sorted({name for run in results for name in run.names})
    for text in asked:
        check_choice("line", text, known)


def best_lines(
    results: Sequence[Result], asked: Sequence[str] = (), name: Callable[[Result], str] = attrgetter("methods")
) -> tuple[list[Result], str]:
    """Return the results of at most eight lines, and the words for a title if others are left out.

    Those `asked` for come first, then those with the most results, then those with the lowest perplexity.
    """
    lines: dict[str, list[Result]] = {}
    for run in results:
        lines.setdefault(name(run), []).append(run)

    def rank(line: str) -> tuple:
        logs = [math.log(run.mean_perplexity) for run in lines[line] if run.perplexity]
        return lines[line][0].names.isdisjoint(asked), -len(lines[line]), fmean(logs or [0.0])

    kept = sorted(lines, key=rank)[:MOST_LINES]
    left_out = f" ({MOST_LINES} of {len(lines)} lines)" if len(lines) > MOST_LINES else ""
    return [run for run in results if name(run) in kept], left_out


def plot_by_seconds(path: Path, title: str, results: Sequence[Result], styles: Styles, dense: Result) -> Path:
    """Draw mean perplexity by mean seconds: a panel per sparsity.

    With a single saliency, the seconds are the top-up's alone, as in the paper's Figure 1.
    """
    alone = {run.saliency for run in results} == {results[0].saliency} != {PRESET}
    xlabel = "Seconds of the top-up" if alone else "Seconds: allocation and pruning"
    panels: dict[str, list[tuple[str, float, float]]] = {}
    for runs in group_by(sorted(results, key=attrgetter("sparsity")), "sparsity", "methods").values():
        seconds = fmean(run.allocation_seconds if alone else run.seconds for run in runs)
        panels.setdefault(runs[0].target, []).extend((run.methods, seconds, run.mean_perplexity) for run in runs)
    styles = {name: {**style, "ls": "none"} for name, style in styles.items()}
    return plot(path, title, panels, styles, xlabel, PERPLEXITY, dense, xscale=SECONDS)


def parameters(result: Result) -> dict[str, Any]:
    """Return hyperparameters and swept fields of a result, and its block lambda if only one was allowed."""
    values = result.config.get("topup_args", {}) | result.setting
    if len(values.get("block_lambdas") or ()) == 1:
        (values[BLOCK_LAMBDA],) = values.pop("block_lambdas")
    return values


def plot_swept(folder: Path, name: str, title: str, topup: str, results: Sequence[Result]) -> list[Path]:
    """Draw a top-up's perplexity by the parameter that has the most values, if these are three numbers or more.

    There is a line per value of what else differs, or per test set if nothing does. For lambdas, each seed has a line, and
    circles mark those that were chosen from several.
    """
    numbers: dict[str, set[float]] = {}
    for key, value in chain.from_iterable(parameters(run).items() for run in results):
        if key != "seed" and type(value) in (int, float):
            numbers.setdefault(key, set()).add(value)
    across = max(numbers, key=lambda key: len(numbers[key]), default="")
    if len(numbers.get(across, ())) < 3:
        return []
    swept = [run for run in results if across in parameters(run)]
    keys = dict.fromkeys(chain.from_iterable(map(parameters, swept)))
    ignored = {across} if across == BLOCK_LAMBDA else {across, "seed"}
    differing = [key for key in keys if len({repr(parameters(run).get(key)) for run in swept}) > 1]
    differing = [key for key in differing if key not in ignored]

    def line_of(run: Result) -> str:
        return ", ".join(f"{key} {parameters(run).get(key)}" for key in differing)

    def values(run: Result) -> Mapping[str, float]:
        return {line_of(run): run.mean_perplexity} if differing else run.perplexity

    drawn, left_out = best_lines(swept, name=line_of)
    points = [(line, parameters(run)[across], y) for run in drawn for line, y in values(run).items()]
    circled: dict[str, list[tuple[float, float]]] = {}
    for run in results if across == BLOCK_LAMBDA else ():
        if across not in parameters(run) and run.block_lambda is not None and run.row_lambda is None:
            by = "reconstruction error" if "reconstruction" in run.topup else "alignment"
            circled.setdefault(f"chosen by the {by}", []).extend((run.block_lambda, y) for y in values(run).values())
    styles = {line: look(index, index) for index, line in enumerate(dict.fromkeys(line for line, _, _ in points))}
    path = folder / f"perplexity-by-{topup}-{across}-{name}".replace(" ", "-")
    ylabel = MEAN if differing else PERPLEXITY
    return [plot(path, title + left_out, {"": points}, styles, f"{across} of {topup}", ylabel, circled=circled)]


def plot(
    path: Path,
    title: str,
    panels: Mapping[str, Points],
    styles: Styles,
    xlabel: str,
    ylabel: str,
    dense: Result | None = None,
    circled: Mapping[str, Sequence[tuple[float, float]]] = {},
    xscale: Mapping[str, Any] = {"value": "linear"},
) -> Path:
    """Draw the lines of each panel, see [`draw_lines`], and circles, with a legend of all below."""
    with new_figure(path, 1 + 3.2 * len(panels), title) as figure:
        from matplotlib.ticker import LogFormatter, PercentFormatter

        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, points) in zip(all_axes, panels.items()):
            axes.set_title(name, loc="left")
            axes.set(xlabel=xlabel, ylabel=ylabel, yscale="linear" if ylabel == SHARE else "log")
            axes.set_xscale(**xscale)
            axes.margins(0.05, 0.1)
            draw_lines(axes, points, styles, dense)
            for color, (label, places) in zip(COLORS[1:], circled.items()):
                axes.plot(*zip(*places), "o", label=label, color=color, ms=15, mfc="none", mew=2.5)
            for text, axis in ((xlabel, axes.xaxis), (ylabel, axes.yaxis)):
                if (scale := axis.get_scale()) != "linear":
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter("{x:g}" if scale == "symlog" else LogFormatter(minor_thresholds=(2, 0.5)))
                if text.startswith(SHARE):
                    axis.set_major_formatter(PercentFormatter(1, 0))
            axes.label_outer()
        handles = {handle.get_label(): handle for axes in all_axes for handle in axes.get_legend_handles_labels()[0]}
        columns = min(4, max(1, 72 // max(8 + len(name) for name in handles)))
        figure.legend(handles=handles.values(), loc="upper center", bbox_to_anchor=(0.5, 0), ncols=columns)
    return path


def draw_lines(axes, points: Points, styles: Styles, dense: Result | None) -> None:
    """Draw means with standard deviations over seeds, and a dense model's perplexity as a line."""
    lines: dict[str, dict[float, list[float]]] = {}
    for name, x, y in points:
        lines.setdefault(name, {}).setdefault(x, []).append(y)
    means = {name: {x: fmean(line[x]) for x in sorted(line)} for name, line in lines.items()}
    if dense is not None:
        axes.axhline(dense.mean_perplexity, label=f"dense model: {dense.mean_perplexity:.4g}", **DENSE_LINE)
    step = 1 + max(map(len, lines.values())) // 16
    for index, (name, line) in enumerate(means.items()):  # lines get markers at different points
        errors = [stdev(lines[name][x]) if len(lines[name][x]) > 1 and y < math.inf else 0.0 for x, y in line.items()]
        bars = {"yerr": errors, "capsize": 3, "errorevery": (index % step, step)} if any(errors) else {}
        axes.errorbar(*zip(*line.items()), label=name, ms=7, markevery=(index % step, step), **bars, **styles[name])


@contextmanager
def new_figure(path: str | Path, height: float, title: str) -> Iterator[Any]:
    """Yield an empty matplotlib figure, `height` inches high, and save it when the block ends.

    The user's matplotlib settings are neither used nor changed.
    """
    require_extra("matplotlib", "report")
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(SHEET, after_reset=True):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle(title)
        yield figure
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def make_styles(results: Sequence[Result]) -> Styles:
    """Return the style of each combination's line: color by saliency, or by top-up if there is one saliency; dashes by top-up."""
    saliencies = [*dict.fromkeys(run.saliency for run in results)]
    topups = [*dict.fromkeys(run.label for run in results)]
    places = {run.methods: (saliencies.index(run.saliency), topups.index(run.label)) for run in results}
    return {name: look(color if len(saliencies) > 1 else line, line) for name, (color, line) in places.items()}


def look(color: int, line: int) -> dict[str, Any]:
    """Return the options of a line. Forty differ in dashes or marker."""
    options = ("color", COLORS, color), ("marker", MARKERS, line), ("ls", DASHES, line)
    return {name: values[index % len(values)] for name, values, index in options}
