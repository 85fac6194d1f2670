"""Perplexity against runtime: what each method costs, and what it brings."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..results import geometric_mean
from .canvas import COLOURS, MARKERS, new_figure
from .point_labels import label_points


def plot_perplexity_by_seconds(results: Sequence[Mapping[str, Any]], path: str | Path) -> list[Path]:
    """Perplexity against runtime, both on log axes: one panel per sparsity, one labelled point per method.

    The colour tells the top-up, the marker the saliency.

    Args:
        results: of every run `saliency`, `topup`, `sparsity` in [0, 1), `perplexity` (dataset -> at least 1),
            `allocation_seconds` and `pruning_seconds` (may be None), and `error` if there was one: such a run is left
            out. Drawn is the geometric mean over the datasets; an infinite one is named in the panel's title.
        path (`str` or `Path`): where to write, without a suffix.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: no run without an error, runs on different datasets, a runtime of zero; a path with a suffix or
            in a folder that does not exist.
    """
    runs = [run for run in results if not run.get("error")]
    datasets = {tuple(sorted(run["perplexity"])) for run in runs}
    if len(datasets) != 1:
        found = "; ".join(", ".join(names) for names in sorted(datasets)) or "no run without an error"
        raise ValueError(f"One figure needs runs on the same datasets, but got: {found}.")
    points = [_point(run) for run in runs]
    sparsities = sorted({run["sparsity"] for run in runs})
    colours = _assign(COLOURS, [run["topup"] for run in runs])
    markers = _assign(MARKERS, [run["saliency"] for run in runs])
    with new_figure(path, 1.0 + 3.6 * len(sparsities)) as (figure, written):
        panels = figure.subplots(len(sparsities), 1, sharex=True, squeeze=False)[:, 0]
        for panel, sparsity in zip(panels, sparsities):
            here = [(run, *point) for run, point in zip(runs, points) if run["sparsity"] == sparsity]
            for run, seconds, perplexity in here:
                if math.isfinite(perplexity):
                    style = {"color": colours[run["topup"]], "marker": markers[run["saliency"]], "label": _name(run)}
                    panel.plot([seconds], [perplexity], ls="none", ms=9, mec="black", alpha=0.75, **style)
            infinite = ", ".join(_name(run) for run, _, perplexity in here if math.isinf(perplexity))
            title = f"{100 * sparsity:.4g} % sparsity" + (f" (infinite: {infinite})" if infinite else "")
            panel.set_title(title, loc="left")
            panel.set(xscale="log", yscale="log", ylabel="Perplexity (lower is better)")
            panel.margins(0.14, 0.16)
        panels[-1].set_xlabel("Runtime in seconds: allocation and pruning")
        of = ", ".join(*datasets)
        title = f"Perplexity: geometric mean over {of}" if "," in of else f"Perplexity on {of}"
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
        _label_log_axes(panels)
        label_points(figure, panels)
    return written


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


def _assign(styles: Sequence, names: Sequence[str]) -> dict:
    """A style for each name, in alphabetical order; they repeat if there are not enough."""
    return {name: styles[index % len(styles)] for index, name in enumerate(sorted(set(names)))}


def _label_log_axes(panels: Sequence) -> None:
    """Round numbers, written out: matplotlib's own are powers of ten, of which a narrow range has none."""
    for axis in [panels[0].xaxis, *(panel.yaxis for panel in panels)]:
        ticks = _log_ticks(*axis.get_view_interval())
        axis.set_ticks(ticks, [f"{tick:,.10g}" for tick in ticks])
        axis.set_ticks([], minor=True)


def _log_ticks(low: float, high: float) -> list[float]:
    """Three to ten round numbers between two positive ones, if there are any of two digits."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for factors in ((10,), (10, 30), (10, 20, 50), (10, 15, 20, 30, 50, 70), range(10, 100, 10), range(10, 100, 5),
                    range(10, 100, 2), range(10, 100)):  # fmt: skip
        ticks = [float(f"{factor}e{decade - 1}") for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks[:: math.ceil(len(ticks) / 10)] if ticks else [low, high]
