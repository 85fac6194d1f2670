"""Perplexity against bits a weight: what each way to make a model smaller loses for what it takes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..averages import geometric_mean
from .canvas import add_legend, add_title, new_figure
from .log_axis import label_log_axis
from .perplexity_by_seconds import datasets_of, over
from .styles import DASHES, DENSE, GREY, MARKERS, Style, make_styles


Line = tuple[str, str, int | None]  # saliency, top-up, bits of values


def plot_perplexity_by_bits(
    results: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    title: str | None = None,
    dense: Mapping[str, float] | None = None,
    styles: Mapping[str, Style] | None = None,
) -> list[Path]:
    """Perplexity on a log axis against bits a weight: one line through the sparsities of a method and number of bits.

    The colour tells the top-up, the marker the saliency, the dashes the bits of values.

    Args:
        results: of every run `saliency`, `topup`, `perplexity` (dataset -> at least 1), `bits_per_weight` (above 0),
            `value_bits` if values were rounded, and `error` if there was one: such a run is left out. Drawn is the
            geometric mean over the datasets; an infinite one is left out.
        path (`str` or `Path`): where to write, without a suffix.
        title (`str`, *optional*): what was pruned.
        dense (`Mapping[str, float]`, *optional*): perplexities of the dense model on these datasets: a line.
        styles (`Mapping[str, Style]`, *optional*): of every top-up, see [`make_styles`]; None: in their order.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: no run without an error, runs on different datasets, or without bits; a path with a suffix or in a
            folder that does not exist.
    """
    runs = [run for run in results if not run.get("error")]
    datasets, lines = datasets_of(runs), _lines(runs)
    styles = styles or make_styles(run["topup"] for run in runs)
    markers = dict(zip(dict.fromkeys(saliency for saliency, _, _ in lines), MARKERS * len(lines)))
    dashes = dict(zip(dict.fromkeys(bits for _, _, bits in lines), DASHES * len(lines)))
    level = None if dense is None else geometric_mean([dense[name] for name in datasets])
    with new_figure(path, 4.2) as (figure, written):
        axes = figure.subplots()
        for (saliency, topup, bits), points in lines.items():
            style = styles[topup]
            face = {"mfc": style.face, "mec": "black" if style.face == style.colour else style.colour, "mew": 0.8}
            look = {"color": style.colour, "marker": markers[saliency], "ls": dashes[bits], "ms": 8, "lw": 1.6}
            axes.plot(*zip(*sorted(points)), **look, **face, alpha=0.8)
        if level is not None and math.isfinite(level):
            axes.axhline(level, **DENSE)
        axes.set(yscale="log", xlabel="Bits a weight of the pruned projections", ylabel="Perplexity (lower is better)")
        label_log_axis(axes.yaxis)
        about = f"perplexity {over(datasets)}"
        add_title(figure, f"{title}: {about}" if title else about.capitalize())
        add_legend(figure, _handles(lines, styles, markers, dashes, level))
    return written


def _lines(runs: Sequence[Mapping[str, Any]]) -> dict[Line, list[tuple[float, float]]]:
    """Of every line, its points: bits a weight, perplexity."""
    lines: dict[Line, list[tuple[float, float]]] = {}
    for run in runs:
        bits = run.get("bits_per_weight")
        if not bits or not bits > 0:
            raise ValueError(f"The run {run['saliency']} + {run['topup']} takes {bits} bits a weight: expected some.")
        points = lines.setdefault((run["saliency"], run["topup"], run.get("value_bits")), [])
        perplexity = geometric_mean(list(run["perplexity"].values()))
        points.append((bits, perplexity if math.isfinite(perplexity) else math.nan))
    return lines


def _handles(lines: Mapping, styles: Mapping, markers: Mapping, dashes: Mapping, level: float | None) -> list:
    """Of the legend: colours for top-ups, grey markers for saliencies, dashes for bits, the dense model's line."""
    from matplotlib.lines import Line2D

    topups = dict.fromkeys(topup for _, topup, _ in lines)
    handles = [Line2D([], [], color=styles[name].colour, marker="o", ls="none", label=name) for name in topups]
    grey = {"color": GREY, "ls": "none"}
    handles += [Line2D([], [], marker=marker, label=name, **grey) for name, marker in markers.items()]
    for bits, dash in dashes.items():
        label = "values as they are" if bits is None else f"values of {bits} bits"
        handles.append(Line2D([], [], color=GREY, ls=dash, label=label))
    if level is not None:
        handles.append(Line2D([], [], label=f"dense model: {level:.4g}", **DENSE))
    return handles
