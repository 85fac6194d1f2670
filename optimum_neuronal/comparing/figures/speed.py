"""Tokens per second with dense and with packed weights, side by side."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .canvas import add_legend, add_title, new_figure
from .log_axis import label_log_axis
from .styles import COLOURS, GREY


def plot_speed(report: Mapping[str, Any], path: str | Path) -> list[Path]:
    """A bar of every form for every kind of work, on a log axis; what each form but the dense brings stands beside them.

    Args:
        report (`Mapping`): from [`SpeedReport.to_dict`].
        path (`str` or `Path`): where to write, without a suffix.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: nothing was measured, or a path with a suffix or in a folder that does not exist.
    """
    timings = report["timings"]
    if not timings:
        raise ValueError("There is nothing to draw: the report has no timings.")
    with new_figure(path, 1.2 + (0.4 + 0.1 * (2 + len(_others(timings)))) * len(timings)) as (figure, written):
        axes = figure.subplots()
        named = {"dense": "dense weights", "packed": "packed weights", **{name: name for name in _others(timings)}}
        width = 0.8 / len(named)
        for offset, (name, colour) in enumerate(zip(named, (GREY, *COLOURS))):
            places = [index + width * (offset - (len(named) - 1) / 2) for index in range(len(timings))]
            axes.barh(
                places, [_rate(timing, name) for timing in timings], 0.95 * width, color=colour, label=named[name]
            )
        for index, timing in enumerate(timings):
            end = max(_rate(timing, name) for name in named)
            ratios = [timing["ratio"], *timing.get("other_ratios", {}).values()]
            text = ", ".join(f"{ratio:.2f}" for ratio in ratios) + " times"
            axes.annotate(text, (end, index), (4, 0), textcoords="offset points", va="center")
        least, most = (choose(_rate(timing, name) for timing in timings for name in named) for choose in (min, max))
        least = 10.0 ** math.floor(math.log10(least) - 0.1)
        axes.set(xscale="log", xlabel="Tokens per second", xlim=(least, most * (most / least) ** 0.2))  # room for text
        axes.set_yticks(range(len(timings)), [timing["work"] for timing in timings])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        label_log_axis(axes.xaxis)
        share = report["packed_bytes"] / report["dense_bytes"]
        threads = f"{report['threads']} thread{'s' * (report['threads'] != 1)}"
        add_title(figure, f"{report['model']}, {report['dtype']}, {threads}: packed, {share:.2f} of the bytes")
        add_legend(figure, axes.containers)
    return written


def _others(timings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the forms beside dense and packed weights."""
    return list(timings[0].get("others", {}))


def _rate(timing: Mapping[str, Any], form: str) -> float:
    """Tokens per second of a form."""
    return timing[form] if form in ("dense", "packed") else timing["others"][form]
