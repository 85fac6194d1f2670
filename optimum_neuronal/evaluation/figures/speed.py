"""Tokens per second with dense and with packed weights, side by side."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .canvas import add_legend, add_title, new_figure
from .log_axis import label_log_axis
from .styles import COLOURS, GREY


def plot_speed(report: Mapping[str, Any], path: str | Path) -> list[Path]:
    """A pair of bars for every kind of work, on a log axis; what packed weights bring stands beside each pair.

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
    with new_figure(path, 1.2 + 0.6 * len(timings)) as (figure, written):
        axes = figure.subplots()
        named = {"dense": "dense weights", "packed": "packed weights"}
        named |= {"coded": report["coded_as"]} if report.get("coded_as") else {}
        width = 0.8 / len(named)
        for offset, (name, colour) in enumerate(zip(named, (GREY, *COLOURS))):
            places = [index + width * (offset - (len(named) - 1) / 2) for index in range(len(timings))]
            axes.barh(places, [timing[name] for timing in timings], 0.95 * width, color=colour, label=named[name])
        for index, timing in enumerate(timings):
            end = max(timing[name] for name in named)
            ratios = [timing["ratio"], *([timing["coded_ratio"]] if "coded" in named else [])]
            text = " and ".join(f"{ratio:.2f}" for ratio in ratios) + " times"
            axes.annotate(text, (end, index), (4, 0), textcoords="offset points", va="center")
        least, most = (choose(timing[name] for timing in timings for name in named) for choose in (min, max))
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
