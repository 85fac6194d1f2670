"""Figures of a comparison: perplexity by seconds and by bits, sparsity by block and by row, perplexity by lambda."""

import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.figure_style import (
    GREY,
    MARKERS,
    Files,
    add_legend,
    make_styles,
    new_figure,
    show_percent,
    show_round_numbers,
    wrapped,
)
from .results import Result, grouped


BY_SECONDS, BY_BITS, BY_BLOCK, BY_ROW, BY_LAMBDA = KINDS = (
    "perplexity-by-seconds", "perplexity-by-bits", "block-sparsity", "row-sparsity", "lambda",
)  # fmt: skip
DENSE_LINE = {"color": "black", "ls": (0, (5, 2)), "lw": 1.4}
POINT = {"ls": "none", "ms": 8, "alpha": 0.8}
LOWER_IS_BETTER = "Perplexity (lower is better)"
MAX_NAMES = 64  # of rows of the heat map
LONGEST = 80  # characters of a method's name in the name of a file

Styles = Mapping[str, Mapping[str, Any]]  # label of a result -> options of its lines


def draw_figures(model: str, dense: Result, results: Sequence[Result]) -> dict[str, Files]:
    """Draw all figures that the results of a comparison allow.

    `perplexity-by-bits` needs several sparsities or budgets of bits, `row-sparsity-...` a top-up that divides sparsity over
    rows, `lambda-...` NeuronAL's block step with several single lambdas: `neuronal:steps=block,block_lambdas=[0.1]`.

    A top-up has the same colour in all figures. A colour means the same sparsity in all heat maps.

    [`Comparison`] has the arguments; failed results are left out. Returns name of a figure -> its files.
    """
    styles = make_styles(result.label for result in results)  # also of failed ones, so that a later run keeps them
    results = [result for result in results if result.error is None]
    if not results:
        return {}
    figures = {BY_SECONDS: plot_perplexity(model, dense, results, styles, False)}
    with_bits = [result for result in results if result.bits_per_weight is not None]
    if len({(result.sparsity, result.budget) for result in with_bits}) > 1:
        figures[BY_BITS] = plot_perplexity(model, dense, with_bits, styles, True)
    shares = [share for result in results for rows in result.row_sparsity.values() for share in rows]
    sparse = [result for result in results if result.budget is None]
    for (saliency, sparsity), members in grouped(sparse, "saliency", "sparsity").items():
        stem = _stem(f"{saliency}-{100 * sparsity:g}")
        title = f"{model}, {saliency}, {members[0].target}"
        figures[f"{BY_BLOCK}-{stem}"] = plot_by_block(title, members, styles)
        for result in members:
            if result.row_sparsity:
                name = f"{model}, {result.pair}, {result.target}"
                drawn = plot_by_row(name, result.row_sparsity, min(shares), max(shares))
                figures[f"{BY_ROW}-{stem}-{_stem(result.topup)}"] = drawn
        single = [r for r in members if r.block_lambda is not None and r.row_lambda is None and r.perplexity]
        by_lambda = {result.block_lambda: result.mean_perplexity for result in single}
        chosen = next((r.block_lambda for r in single if len(r.decisions["block"]["candidates"]) > 1), None)
        if chosen is not None and len(by_lambda) > 2:
            figures[f"{BY_LAMBDA}-{stem}"] = plot_by_lambda(f"{title}: {_subject(members)}", by_lambda, chosen)
    return figures


def plot_perplexity(model: str, dense: Result, results: Sequence[Result], styles: Styles, by_bits: bool) -> Files:
    """Draw perplexity on a log axis. The colour shows the top-up, the marker the saliency.

    By bits a weight, a line per method joins its sparsities or budgets. By runtime, on a log axis, a method is a point, and
    each sparsity and budget of bits has a panel.
    """
    if by_bits:
        panels, axis, line = [list(results)], {"xlabel": "Bits a weight of the pruned projections"}, "-"
    else:
        results = sorted(results, key=lambda result: (result.sparsity, -(result.budget or 99)))
        panels = list(grouped(results, "sparsity", "budget").values())
        axis, line = {"xlabel": "Runtime in seconds: rotation, allocation and pruning", "xscale": "log"}, "none"
    markers = dict(zip(dict.fromkeys(result.saliency for result in results), itertools.cycle(MARKERS)))
    with new_figure(1 + 3.2 * len(panels), f"{model}: {_subject(results)}") as (figure, files):
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, members in zip(all_axes, panels):
            for (saliency, label), runs in grouped(members, "saliency", "label").items():
                finite = [r.mean_perplexity if math.isfinite(r.mean_perplexity) else math.nan for r in runs]
                points = sorted(zip([r.bits_per_weight if by_bits else r.seconds for r in runs], finite))
                look = {"marker": markers[saliency], "ls": line}
                axes.plot(*zip(*points), **styles[label] | POINT | look)
            axes.axhline(dense.mean_perplexity, **DENSE_LINE)
            if not by_bits:
                infinite = [r.pair for r in members if math.isinf(r.mean_perplexity)]
                title = members[0].target + (f" (infinite: {', '.join(infinite)})" if infinite else "")
                axes.set_title(wrapped(title), loc="left")
            axes.set(yscale="log", ylabel=LOWER_IS_BETTER, **axis)
            axes.margins(0.06, 0.12)
            axes.label_outer()
            show_round_numbers(axes.yaxis)
        show_round_numbers(all_axes[0].xaxis)
        figure.align_ylabels(all_axes)
        from matplotlib.lines import Line2D  # new_figure has checked that it is there

        shown = [(name, styles[name] | POINT | {"marker": "o"}) for name in dict.fromkeys(r.label for r in results)]
        shown += [(name, {"color": GREY, "ls": "none", "ms": 8, "marker": marker}) for name, marker in markers.items()]
        shown.append((f"dense model: {dense.mean_perplexity:.4g}", DENSE_LINE))
        add_legend(figure, [Line2D([], [], label=name, **look) for name, look in shown])
    return files


def plot_by_block(title: str, results: Sequence[Result], styles: Styles) -> Files:
    """Draw the sparsity of every decoder block: a line per top-up."""
    count = len(results[0].block_sparsity)
    step = 1 + count // 16
    with new_figure(3.6, title) as (figure, files):
        axes = figure.subplots()
        for index, result in enumerate(results):
            own = {"label": result.label, "markevery": (index % step, step)}  # lines get markers at different blocks
            axes.plot(range(count), result.block_sparsity, lw=1.8, ms=6, **styles[result.label], **own)
        axes.set(xlabel="Decoder block", ylabel="Sparsity")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=min(3, count))
        show_round_numbers(axes.yaxis)
        show_percent(axes.yaxis)
        add_legend(figure, axes.lines)
    return files


def plot_by_row(title: str, rows: Mapping[str, Sequence[float]], low: float, high: float) -> Files:
    """Draw a heat map of the sparsity of rows: a line per projection, the weight's first rows at the left.

    `rows` maps names to shares of zeros, equally many for each; `low` and `high` are the shares at the ends of the colours.
    """
    height = max(2.4, 1.4 + min(0.2 * len(rows), 13))
    spare = 0.005 if low == high else 0.0  # a scale needs an extent
    with new_figure(height, title) as (figure, files):
        axes = figure.subplots()
        axes.grid(False)
        options = {"interpolation": "nearest", "aspect": "auto", "extent": (0, 1, len(rows), 0)}
        image = axes.imshow(list(rows.values()), vmin=low - spare, vmax=high + spare, **options)
        starts, names = _row_names(list(rows))
        axes.hlines(starts[1:], 0, 1, color="white", lw=0.6)
        axes.set_yticks([(start + stop) / 2 for start, stop in zip(starts, [*starts[1:], len(rows)])], names)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("Position of the row in the weight")
        bar = figure.colorbar(image, ax=axes, aspect=4 * height, pad=0.02, label="Row sparsity")
        bar.outline.set_visible(False)
        show_round_numbers(bar.ax.yaxis)
        for axis in (axes.xaxis, bar.ax.yaxis):
            show_percent(axis)
    return files


def plot_by_lambda(title: str, perplexities: Mapping[float, float], chosen: float) -> Files:
    """Draw perplexity by lambda, the half-width of NeuronAL's sparsity window, and mark the lambda that NeuronAL chose."""
    with new_figure(3.6, title) as (figure, files):
        axes = figure.subplots()
        axes.plot(*zip(*sorted(perplexities.items())), "o-", color="black", ms=5, label="candidate")
        look = {"color": "#E69F00", "mec": "black", "ms": 11, "label": f"chosen: {chosen:g}"}
        axes.plot([chosen], [perplexities[chosen]], "D", **look)
        axes.set(xlabel="Lambda: half-width of the sparsity window", ylabel=LOWER_IS_BETTER)
        axes.margins(y=0.12)
        for axis in (axes.xaxis, axes.yaxis):
            show_round_numbers(axis)
        add_legend(figure, axes.lines)
    return files


def _subject(results: Sequence[Result]) -> str:
    """Return what is drawn: `"perplexity on wikitext2"`."""
    names = ", ".join(sorted(results[0].perplexity))
    return f"perplexity (geometric mean of {names})" if len(results[0].perplexity) > 1 else f"perplexity on {names}"


def _row_names(names: list[str]) -> tuple[list[int], list[str]]:
    """Return the first line and the name of each part of a heat map: of each projection or, if there are many, block."""
    if len(names) <= MAX_NAMES:
        return list(range(len(names))), [re.sub(r"^\D*?(?=\d+\.)", "", name) for name in names]
    blocks = [match[1] if (match := re.search(r"\.(\d+)\.", name)) else name for name in names]
    starts = [index for index in range(len(names)) if index == 0 or blocks[index] != blocks[index - 1]]
    starts = starts[:: math.ceil(len(starts) / MAX_NAMES)]
    return starts, [f"block {blocks[start]}" for start in starts]


def _stem(name: str) -> str:
    """Return a name as part of a file's name; a long one is cut, and a digest of the whole name added."""
    stem = re.sub(r"[^\w-]+", "_", name).strip("_")
    return stem if len(stem) <= LONGEST else f"{stem[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
