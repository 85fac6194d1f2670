"""Tokens per second with dense and with packed weights, side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .canvas import COLOURS, GREY, add_legend, new_figure


def plot_speed(report: Mapping[str, Any], path: str | Path) -> list[Path]:
    """A pair of bars for every kind of work, on a log axis; what packed weights bring stands above each pair.

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
    with new_figure(path, 3.8) as (figure, written):
        axes = figure.subplots()
        for offset, (name, colour) in enumerate((("dense", GREY), ("packed", COLOURS[0]))):
            places = [index + 0.4 * offset - 0.2 for index in range(len(timings))]
            axes.bar(places, [timing[name] for timing in timings], 0.38, color=colour, label=f"{name} weights")
        for index, timing in enumerate(timings):
            height = max(timing["dense"], timing["packed"])
            axes.annotate(
                f"{timing['ratio']:.2f} times", (index, height), (0, 4), textcoords="offset points", ha="center"
            )
        axes.set(yscale="log", ylabel="Tokens per second", xticks=range(len(timings)))
        axes.set_xticklabels([timing["work"] for timing in timings])
        axes.margins(y=0.15)
        axes.grid(axis="x", visible=False)
        share = report["packed_bytes"] / report["dense_bytes"]
        title = f"{report['model']}, {report['dtype']}, {report['threads']} threads: packed, {share:.2f} of the bytes"
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
        add_legend(figure, axes)
    return written
