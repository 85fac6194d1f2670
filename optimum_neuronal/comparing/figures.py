"""Figures of a comparison: perplexity by seconds, sparsity, bits, lambda and other parameters, and sparsity by block."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..common import figure_style as style
from ..common.registry import parse_method
from .results import Result, grouped


AXES = {  # attribute of a result -> label of its axis
    "seconds": "Seconds: rotation, allocation and pruning",
    "sparsity": "Sparsity of the pruned projections",
    "bits_per_weight": "Bits per weight of the pruned projections",
}
PERPLEXITY = "Perplexity (lower is better)"
DENSE_LINE = {"color": "black", "ls": (0, (5, 2)), "lw": 1.4}
POINT = {"ls": "none", "ms": 8, "alpha": 0.8}
CIRCLES = (style.COLORS[1], style.COLORS[2])
BLOCK_LAMBDA = "block lambda"

Points = Sequence[tuple[float, float]]
Styles = Mapping[str, Mapping[str, Any]]  # label -> options of its line


def draw_figures(model: str, dense: Result, results: Sequence[Result]) -> dict[str, style.Files]:
    """Draw all figures that the results of a comparison allow: name -> files. Failed results are left out."""
    # also of failed ones, so that a later run keeps them
    styles = style.make_styles(result.label for result in results)
    results = [result for result in results if result.error is None]
    if not results:
        return {}
    methods = [result for result in results if result.budget is None]
    kinds = {"seconds": results, "sparsity": methods}
    kinds["bits_per_weight"] = [result for result in results if result.bits_per_weight is not None]
    figures = {}
    for by, own in kinds.items():
        if by == "seconds" or len({getattr(result, by) for result in own}) > (2 if by == "sparsity" else 1):
            figures[f"perplexity-by-{by.partition('_')[0]}"] = plot_perplexity(model, dense, own, styles, by)
    for (saliency, sparsity), members in grouped(methods, "saliency", "sparsity").items():
        name = re.sub(r"[^\w-]+", "_", f"{saliency}-{100 * sparsity:g}")[:100]
        title = f"{model}, {saliency}, {members[0].target}"
        figures[f"block-sparsity-{name}"] = plot_by_block(title, members, styles)
        figures |= {f"perplexity-by-{key}-{name}": files for key, files in _by_parameters(title, members)}
    return figures


def plot_perplexity(model: str, dense: Result, results: Sequence[Result], styles: Styles, by: str) -> style.Files:
    """Draw mean perplexity by an attribute in AXES. Colors show the top-up, markers the saliency.

    Seconds get a panel per amount; all others a line per method.
    """
    panels, line = [list(results)], "-"
    if by == "seconds":
        results = sorted(results, key=lambda result: (result.sparsity, -(result.budget or 99)))
        panels, line = list(grouped(results, "sparsity", "budget").values()), "none"
    markers = dict(zip(dict.fromkeys(result.saliency for result in results), itertools.cycle(style.MARKERS)))
    names = ", ".join(sorted(results[0].perplexity))
    with style.new_figure(1 + 3.2 * len(panels), f"{model}: perplexity on {names}") as (figure, files):
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, members in zip(all_axes, panels):
            for (saliency, label), runs in grouped(members, "saliency", "label").items():
                finite = [r.mean_perplexity if math.isfinite(r.mean_perplexity) else math.nan for r in runs]
                points = sorted(zip([getattr(r, by) for r in runs], finite))
                axes.plot(*zip(*points), **styles[label] | POINT | {"marker": markers[saliency], "ls": line})
            axes.axhline(dense.mean_perplexity, **DENSE_LINE)
            if by == "seconds":
                infinite = [r.method for r in members if math.isinf(r.mean_perplexity)]
                title = members[0].target + (f" (infinite: {'; '.join(infinite)})" if infinite else "")
                axes.set_title(style.wrapped(title), loc="left")
            axes.set(yscale="log", ylabel=PERPLEXITY, xlabel=AXES[by], xscale="log" if by == "seconds" else "linear")
            axes.margins(0.06, 0.12)
            axes.label_outer()
            style.show_round_numbers(axes.yaxis)
        style.show_round_numbers(all_axes[0].xaxis)
        if by == "sparsity":
            style.show_percent(all_axes[0].xaxis)
        figure.align_ylabels(all_axes)
        from matplotlib.lines import Line2D  # new_figure has checked that it is there

        shown = [(name, styles[name] | POINT | {"marker": "o"}) for name in dict.fromkeys(r.label for r in results)]
        shown += [
            (name, {"color": style.GRAY, "ls": "none", "ms": 8, "marker": marker}) for name, marker in markers.items()
        ]
        shown.append((f"dense model: {dense.mean_perplexity:.4g}", DENSE_LINE))
        style.add_legend(figure, [Line2D([], [], label=name, **look) for name, look in shown])
    return files


def _by_parameters(title: str, results: Sequence[Result]) -> Iterator[tuple[str, style.Files]]:
    """Draw the perplexity of every top-up that was run with three values of a number or more. Yield a name and files."""
    for name, runs in _by_method(results).items():
        numbers = [_numbers(run) for run in runs]
        found = {key: {own[key] for own in numbers if key in own} for own in numbers for key in own}
        across = max(found, key=lambda key: len(found[key]), default="")
        if len(found.get(across, ())) < 3:
            continue
        lines: dict[str, dict[float, float]] = {}
        marks: dict[str, list[tuple[float, float]]] = {}
        alone = all(own.keys() <= {across} for own in numbers)
        for run, own in zip(runs, numbers):
            if across not in own:
                continue
            others = ", ".join(f"{key}={value:g}" for key, value in own.items() if key != across)
            for line, value in run.perplexity.items() if alone else [(others, run.mean_perplexity)]:
                lines.setdefault(line, {})[own[across]] = value if math.isfinite(value) else math.nan
                if across == BLOCK_LAMBDA and len(run.decisions["block"]["candidates"]) > 1:
                    by = "reconstruction error" if "reconstruction" in run.topup else "alignment"
                    marks.setdefault(f"chosen by the {by}", []).append((own[across], value))
        axes = {"xlabel": f"{across} of {name}", "ylabel": PERPLEXITY, "yscale": "log"}
        points = {line: sorted(values.items()) for line, values in lines.items()}
        yield f"{name}-{across.replace(' ', '-')}", plot_lines(title, points, style.make_styles(lines), axes, marks)


def _by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    methods: dict[str, list[Result]] = {}
    for result in results:
        methods.setdefault(parse_method(result.topup)[0], []).append(result)
    return methods


def _numbers(result: Result) -> dict[str, float]:
    """Return the numbers that a result depends on, hyper-parameters and swept fields, and the lambda of a block step."""
    values = parse_method(result.topup)[1] | result.setting
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float)) and key != "seed"}
    if result.block_lambda is not None and result.row_lambda is None:
        numbers[BLOCK_LAMBDA] = result.block_lambda
    return numbers


def plot_by_block(title: str, results: Sequence[Result], styles: Styles) -> style.Files:
    """Draw the sparsity of every decoder block: a line per top-up."""
    lines = {result.label: list(enumerate(result.block_sparsity)) for result in results}
    return plot_lines(title, lines, styles, {"xlabel": "Decoder block", "ylabel": "Sparsity"})


def plot_lines(
    title: str,
    lines: Mapping[str, Points],
    styles: Styles,
    axes_options: Mapping[str, Any],
    marks: Mapping[str, Points] | None = None,
) -> style.Files:
    """Draw a line per name, and circles around points."""
    step = 1 + max(map(len, lines.values())) // 16  # lines get markers at different points
    with style.new_figure(4.2, title) as (figure, files):
        axes = figure.subplots()
        for index, (name, points) in enumerate(lines.items()):
            axes.plot(*zip(*points), label=name, ms=6, markevery=(index % step, step), **styles[name])
        for color, (name, points) in zip(CIRCLES, (marks or {}).items()):
            axes.plot(*zip(*points), label=name, color=color, ls="none", marker="o", ms=15, mfc="none", mew=2.5)
        axes.set(**axes_options)
        style.show_round_numbers(axes.xaxis)
        style.show_round_numbers(axes.yaxis)
        if axes_options["ylabel"] != PERPLEXITY:
            style.show_percent(axes.yaxis)
        style.add_legend(figure, axes.lines)
    return files
