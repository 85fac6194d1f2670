"""Perplexity against runtime: what each method costs, and what it brings."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..averages import geometric_mean
from .canvas import add_legend, add_title, new_figure, wrapped
from .log_axis import label_log_axis
from .styles import DENSE, GREY, MARKERS, Style, make_styles


def plot_perplexity_by_seconds(
    results: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    title: str | None = None,
    dense: Mapping[str, float] | None = None,
    styles: Mapping[str, Style] | None = None,
) -> list[Path]:
    """Perplexity against runtime, both on log axes: one panel per sparsity and number of bits, one point per method.

    The colour tells the top-up, the marker the saliency.

    Args:
        results: of every run `saliency`, `topup`, `sparsity` in [0, 1), `perplexity` (dataset -> at least 1),
            `allocation_seconds` and `pruning_seconds` (may be None), `value_bits` if values were rounded, and `error` if there was one: such a run is left
            out. Drawn is the geometric mean over the datasets; an infinite one is named in the panel's title.
        path (`str` or `Path`): where to write, without a suffix.
        title (`str`, *optional*): what was pruned.
        dense (`Mapping[str, float]`, *optional*): perplexities of the dense model on these datasets: a line.
        styles (`Mapping[str, Style]`, *optional*): of every top-up, see [`make_styles`]; None: in their order.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: no run without an error, runs on different datasets, a runtime of zero; a path with a suffix or
            in a folder that does not exist.
    """
    runs = [run for run in results if not run.get("error")]
    datasets = datasets_of(runs)
    points = [(run, *_point(run)) for run in runs]
    targets = sorted({_target(run) for run in runs}, key=lambda target: (target[0], -(target[1] or 99)))
    styles = styles or make_styles(run["topup"] for run in runs)
    saliencies = list(dict.fromkeys(run["saliency"] for run in runs))
    markers = {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(saliencies)}
    level = None if dense is None else geometric_mean([dense[name] for name in datasets])
    with new_figure(path, 0.6 + 3.2 * len(targets)) as (figure, written):
        panels = figure.subplots(len(targets), 1, sharex=True, squeeze=False)[:, 0]
        for panel, target in zip(panels, targets):
            _draw(panel, target, [point for point in points if _target(point[0]) == target], styles, markers)
            if level is not None and math.isfinite(level):
                panel.axhline(level, **DENSE)
        for axis in (panels[0].xaxis, *(panel.yaxis for panel in panels)):
            label_log_axis(axis)
        panels[-1].set_xlabel("Runtime in seconds: allocation and pruning")
        figure.align_ylabels(panels)
        add_title(figure, _title(title, saliencies, datasets))
        add_legend(figure, _handles(runs, styles, markers, level))
    return written


def over(datasets: Sequence[str]) -> str:
    """What a perplexity is of, if it is drawn as one number: `"on wikitext2"`."""
    names = ", ".join(datasets)
    return f"(geometric mean of {names})" if len(datasets) > 1 else f"on {names}"


def _title(title: str | None, saliencies: Sequence[str], datasets: Sequence[str]) -> str:
    pruned = ", ".join([*([title] if title else []), *(saliencies if len(saliencies) == 1 else [])])
    return (f"{pruned}: p" if pruned else "P") + f"erplexity {over(datasets)}"


def datasets_of(runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the datasets that all runs were measured on. Raises `ValueError` if they differ."""
    found = {tuple(sorted(run["perplexity"])) for run in runs}
    if len(found) != 1:
        told = "; ".join(", ".join(names) for names in sorted(found)) or "no run without an error"
        raise ValueError(f"One figure needs runs on the same datasets, but got: {told}.")
    return found.pop()


def _target(run: Mapping[str, Any]) -> tuple[float, int | None]:
    """Sparsity, and bits of values."""
    return run["sparsity"], run.get("value_bits")


def _draw(panel, target: tuple[float, int | None], points: Sequence[tuple], styles: Mapping, markers: Mapping) -> None:
    """One panel's points: (run, seconds, perplexity)."""
    for run, seconds, perplexity in points:
        if math.isfinite(perplexity):
            style = styles[run["topup"]]
            panel.plot([seconds], [perplexity], **_look(style, markers[run["saliency"]]), alpha=0.8)
    infinite = ", ".join(_name(run) for run, _, perplexity in points if math.isinf(perplexity))
    sparsity, bits = target
    title = f"{100 * sparsity:.4g} % sparsity" + ("" if bits is None else f", {bits} bits")
    title += f" (infinite: {infinite})" if infinite else ""
    panel.set_title(wrapped(title), loc="left")
    panel.set(xscale="log", yscale="log", ylabel="Perplexity (lower is better)")
    panel.margins(0.06, 0.12)


def _look(style: Style, marker: str) -> dict[str, Any]:
    """A point of a method."""
    filled = style.face == style.colour
    edge = {"mec": "black", "mew": 1.0} if filled else {"mec": style.colour, "mew": 2.0}
    return {"ls": "none", "ms": 9, "marker": marker, "color": style.colour, "mfc": style.face, **edge}


def _handles(runs: Sequence[Mapping], styles: Mapping, markers: Mapping, level: float | None) -> list:
    """Of the legend: colours for top-ups, grey markers for saliencies, the dense model's line."""
    from matplotlib.lines import Line2D

    topups = dict.fromkeys(run["topup"] for run in runs)
    handles = [Line2D([], [], label=name, **_look(styles[name], MARKERS[0])) for name in topups]
    if len(markers) > 1:  # otherwise the title tells the saliency
        grey = Style(GREY, MARKERS[0], "-", GREY)
        handles += [Line2D([], [], label=name, **_look(grey, marker)) for name, marker in markers.items()]
    if level is not None:
        handles.append(Line2D([], [], label=f"dense model: {level:.4g}", **DENSE))
    return handles


def _name(run: Mapping[str, Any]) -> str:
    """What a run is called in the figure."""
    return f"{run['saliency']} + {run['topup']}"


def _point(run: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds and perplexity of one run."""
    name = f"{_name(run)} at {run['sparsity']:g}"
    seconds = (run.get("allocation_seconds") or 0.0) + (run.get("pruning_seconds") or 0.0)
    if not seconds > 0:
        raise ValueError(f"The run {name} took {seconds} seconds, but a log axis needs more than 0.")
    values = list(run["perplexity"].values())
    if not all(value >= 1 for value in values):
        raise ValueError(f"The run {name} has the perplexities {values}, but a perplexity is at least 1.")
    return seconds, geometric_mean(values)
