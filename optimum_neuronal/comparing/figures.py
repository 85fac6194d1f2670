"""Figures of a comparison: perplexity by seconds, sparsity, bits, lambda and other parameters, and sparsity by block."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..common import figure_style as style
from ..common.registry import parse_method
from .results import Result, grouped


PERPLEXITY, MEAN = "Perplexity (lower is better)", "Geometric mean of perplexities"
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
    figures = {"perplexity-by-seconds": plot_by_seconds(model, dense, results, styles)}
    with_bits = [result for result in results if result.bits_per_weight is not None]
    if any(result.budget for result in with_bits) and len({(r.sparsity, r.budget) for r in with_bits}) > 1:
        lines = _lines(with_bits, "bits_per_weight")
        figures["perplexity-by-bits"] = plot_lines(
            _title(model, dense), lines, "Bits per weight of the pruned projections", dense
        )
    methods = [result for result in results if result.budget is None]
    if len({result.sparsity for result in methods}) > 2:
        lines = _lines(methods, "sparsity")
        figures["perplexity-by-sparsity"] = plot_lines(
            _title(model, dense), lines, "Sparsity of the pruned projections", dense
        )
    for (saliency, sparsity), members in grouped(methods, "saliency", "sparsity").items():
        name = re.sub(r"[^\w-]+", "_", f"{saliency}-{100 * sparsity:g}")[:100]
        title = f"{model}, {saliency}, {members[0].target}"
        shares = {result.label: list(enumerate(result.block_sparsity)) for result in members}
        figures[f"block-sparsity-{name}"] = plot_lines(
            title, shares, "Decoder block", ylabel="Sparsity", styles=styles
        )
        figures |= {f"perplexity-by-{key}-{name}": files for key, files in _by_parameters(title, members)}
    return figures


def plot_by_seconds(model: str, dense: Result, results: Sequence[Result], styles: Styles) -> style.Files:
    """Draw mean perplexity by seconds: a panel per amount. Colors show the top-up, markers the saliency."""
    results = sorted(results, key=lambda result: (result.sparsity, -(result.budget or 99)))
    panels = list(grouped(results, "sparsity", "budget").values())
    markers = dict(zip(dict.fromkeys(result.saliency for result in results), itertools.cycle(style.MARKERS)))
    title = _title(model, dense)
    with style.new_figure(1 + 3.2 * len(panels), title) as (figure, files):
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, members in zip(all_axes, panels):
            for run in members:
                look = styles[run.label] | POINT | {"marker": markers[run.saliency]}
                axes.plot(run.seconds, _finite(run.mean_perplexity), **look)
            infinite = [run.method for run in members if math.isinf(run.mean_perplexity)]
            title = members[0].target + (f" (infinite: {'; '.join(infinite)})" if infinite else "")
            axes.set_title(style.wrapped(title), loc="left")
            axes.axhline(dense.mean_perplexity, **DENSE_LINE)
            axes.set(xscale="log", xlabel="Seconds: rotation, allocation and pruning", yscale="log", ylabel=PERPLEXITY)
            axes.margins(0.06, 0.12)
            axes.label_outer()
            style.show_round_numbers(axes.yaxis)
        style.show_round_numbers(all_axes[0].xaxis)
        figure.align_ylabels(all_axes)
        from matplotlib.lines import Line2D  # new_figure has checked that it is there

        shown = [(name, styles[name] | POINT | {"marker": "o"}) for name in dict.fromkeys(r.label for r in results)]
        shown += [(name, POINT | {"color": style.GRAY, "marker": marker}) for name, marker in markers.items()]
        shown.append((f"dense model: {dense.mean_perplexity:.4g}", DENSE_LINE))
        style.add_legend(figure, [Line2D([], [], label=name, **look) for name, look in shown])
    return files


def _title(model: str, dense: Result) -> str:
    names = ", ".join(sorted(dense.perplexity))
    return f"{model}: {MEAN[0].lower() + MEAN[1:] if len(dense.perplexity) > 1 else 'perplexity'} on {names}"


def _lines(results: Sequence[Result], attribute: str) -> dict[str, Points]:
    """Return a line per method: mean perplexities by an attribute."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        lines.setdefault(f"{result.saliency} + {result.topup}", []).append(
            (getattr(result, attribute), result.mean_perplexity)
        )
    return {name: sorted(points) for name, points in lines.items()}


def _by_parameters(title: str, results: Sequence[Result]) -> Iterator[tuple[str, style.Files]]:
    """Draw the perplexity of every top-up that was run with three values of a number or more. Yield a name and files."""
    methods: dict[str, list[tuple[Result, dict[str, float]]]] = {}
    for result in results:
        name, values = parse_method(result.topup)
        values |= result.setting
        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float)) and key != "seed"}
        if result.block_lambda is not None and result.row_lambda is None:
            numbers[BLOCK_LAMBDA] = result.block_lambda
        methods.setdefault(name, []).append((result, numbers))
    for name, runs in methods.items():
        found = {key: {own[key] for _, own in runs if key in own} for _, numbers in runs for key in numbers}
        across = max(found, key=lambda key: len(found[key]), default="")
        if len(found.get(across, ())) < 3:
            continue
        runs = [(run, own) for run, own in runs if across in own]
        lines: dict[str, dict[float, float]] = {}
        marks: dict[str, list[tuple[float, float]]] = {}
        for run, own in runs:
            others = ", ".join(f"{key}={value:g}" for key, value in own.items() if key != across)
            for line, value in [(others, run.mean_perplexity)] if others else run.perplexity.items():
                lines.setdefault(line, {})[own[across]] = value
                if across == BLOCK_LAMBDA and len(run.decisions["block"]["candidates"]) > 1:
                    by = "reconstruction error" if "reconstruction" in run.topup else "alignment"
                    marks.setdefault(f"chosen by the {by}", []).append((own[across], value))
        points = {line: sorted(values.items()) for line, values in lines.items()}
        key = f"{name}-{across}".replace(" ", "-")
        ylabel = (
            MEAN if lines.keys() != runs[0][0].perplexity.keys() and len(runs[0][0].perplexity) > 1 else PERPLEXITY
        )
        yield key, plot_lines(title, points, f"{across} of {name}", ylabel=ylabel, marks=marks)


def plot_lines(
    title: str,
    lines: Mapping[str, Points],
    xlabel: str,
    dense: Result | None = None,
    ylabel: str = PERPLEXITY,
    styles: Styles | None = None,
    marks: Mapping[str, Points] | None = None,
) -> style.Files:
    """Draw a line per name, the dense model's perplexity, and circles around points. Shares are shown in percent."""
    step = 1 + max(map(len, lines.values())) // 16
    styles = style.make_styles(lines) if styles is None else styles
    with style.new_figure(4.2, title) as (figure, files):
        axes = figure.subplots()
        for index, (name, points) in enumerate(lines.items()):  # lines get markers at different points
            finite = [(x, _finite(y)) for x, y in points]
            axes.plot(*zip(*finite), label=name, ms=6, markevery=(index % step, step), **styles[name])
        for color, (name, points) in zip(CIRCLES, (marks or {}).items()):
            axes.plot(*zip(*points), label=name, color=color, ls="none", marker="o", ms=15, mfc="none", mew=2.5)
        if dense is not None:
            axes.axhline(dense.mean_perplexity, label=f"dense model: {dense.mean_perplexity:.4g}", **DENSE_LINE)
        axes.set(xlabel=xlabel, ylabel=ylabel, yscale="linear" if ylabel == "Sparsity" else "log")
        for label, axis in ((xlabel, axes.xaxis), (ylabel, axes.yaxis)):
            style.show_round_numbers(axis)
            if label.startswith("Sparsity"):
                style.show_percent(axis)
        style.add_legend(figure, axes.lines)
    return files


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
