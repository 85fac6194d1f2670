"""Figures of a comparison: perplexity by seconds and by bits, sparsity by block."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..common import figure_style as style
from .results import Result, grouped


BY_SECONDS, BY_BITS, BY_BLOCK = "perplexity-by-seconds", "perplexity-by-bits", "block-sparsity"
DENSE_LINE = {"color": "black", "ls": (0, (5, 2)), "lw": 1.4}
POINT = {"ls": "none", "ms": 8, "alpha": 0.8}

Styles = Mapping[str, Mapping[str, Any]]  # label of a result -> options of its lines


def draw_figures(model: str, dense: Result, results: Sequence[Result]) -> dict[str, style.Files]:
    """Draw all figures that the results of a comparison allow: name -> files. Failed results are left out."""
    # also of failed ones, so that a later run keeps them
    styles = style.make_styles(result.label for result in results)
    results = [result for result in results if result.error is None]
    if not results:
        return {}
    figures = {BY_SECONDS: plot_perplexity(model, dense, results, styles, False)}
    with_bits = [result for result in results if result.bits_per_weight is not None]
    if len({(result.sparsity, result.budget) for result in with_bits}) > 1:
        figures[BY_BITS] = plot_perplexity(model, dense, with_bits, styles, True)
    sparse = [result for result in results if result.budget is None]
    for (saliency, sparsity), members in grouped(sparse, "saliency", "sparsity").items():
        name = re.sub(r"[^\w-]+", "_", f"{saliency}-{100 * sparsity:g}")[:100]
        title = f"{model}, {saliency}, {members[0].target}"
        figures[f"{BY_BLOCK}-{name}"] = plot_by_block(title, members, styles)
    return figures


def plot_perplexity(
    model: str, dense: Result, results: Sequence[Result], styles: Styles, by_bits: bool
) -> style.Files:
    """Draw perplexity by bits (a line per method) or by seconds (a panel per amount); markers show the saliency."""
    if by_bits:
        panels, axis, line = [list(results)], {"xlabel": "Bits per weight of the pruned projections"}, "-"
    else:
        results = sorted(results, key=lambda result: (result.sparsity, -(result.budget or 99)))
        panels = list(grouped(results, "sparsity", "budget").values())
        axis, line = {"xlabel": "Seconds: rotation, allocation and pruning", "xscale": "log"}, "none"
    markers = dict(zip(dict.fromkeys(result.saliency for result in results), itertools.cycle(style.MARKERS)))
    names = ", ".join(sorted(results[0].perplexity))
    with style.new_figure(1 + 3.2 * len(panels), f"{model}: perplexity on {names}") as (figure, files):
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, members in zip(all_axes, panels):
            for (saliency, label), runs in grouped(members, "saliency", "label").items():
                finite = [r.mean_perplexity if math.isfinite(r.mean_perplexity) else math.nan for r in runs]
                points = sorted(zip([r.bits_per_weight if by_bits else r.seconds for r in runs], finite))
                axes.plot(*zip(*points), **styles[label] | POINT | {"marker": markers[saliency], "ls": line})
            axes.axhline(dense.mean_perplexity, **DENSE_LINE)
            if not by_bits:
                infinite = [r.method for r in members if math.isinf(r.mean_perplexity)]
                title = members[0].target + (f" (infinite: {'; '.join(infinite)})" if infinite else "")
                axes.set_title(style.wrapped(title), loc="left")
            axes.set(yscale="log", ylabel="Perplexity (lower is better)", **axis)
            axes.margins(0.06, 0.12)
            axes.label_outer()
            style.show_round_numbers(axes.yaxis)
        style.show_round_numbers(all_axes[0].xaxis)
        figure.align_ylabels(all_axes)
        from matplotlib.lines import Line2D  # new_figure has checked that it is there

        shown = [(name, styles[name] | POINT | {"marker": "o"}) for name in dict.fromkeys(r.label for r in results)]
        shown += [
            (name, {"color": style.GRAY, "ls": "none", "ms": 8, "marker": marker}) for name, marker in markers.items()
        ]
        shown.append((f"dense model: {dense.mean_perplexity:.4g}", DENSE_LINE))
        style.add_legend(figure, [Line2D([], [], label=name, **look) for name, look in shown])
    return files


def plot_by_block(title: str, results: Sequence[Result], styles: Styles) -> style.Files:
    """Draw the sparsity of every decoder block: a line per top-up."""
    count = len(results[0].block_sparsity)
    step = 1 + count // 16
    with style.new_figure(3.6, title) as (figure, files):
        axes = figure.subplots()
        for index, result in enumerate(results):
            own = {"label": result.label, "markevery": (index % step, step)}  # lines get markers at different blocks
            axes.plot(range(count), result.block_sparsity, lw=1.8, ms=6, **styles[result.label], **own)
        axes.set(xlabel="Decoder block", ylabel="Sparsity")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=min(3, count))
        style.show_round_numbers(axes.yaxis)
        style.show_percent(axes.yaxis)
        style.add_legend(figure, axes.lines)
    return files
