"""A quantity against lambda, the half-width of NeuronAL's sparsity window."""

import math
from collections.abc import Sequence
from pathlib import Path

from .canvas import add_legend, add_title, new_figure, show_rounded
from .styles import COLOURS, GREY


def plot_lambda_curve(
    candidates: Sequence[tuple[float, float | None]],
    chosen: float,
    path: str | Path,
    quantity: str,
    *,
    title: str | None = None,
) -> list[Path]:
    """A quantity against lambda, the half-width of the sparsity window, with the chosen lambda marked.

    Args:
        candidates: (lambda, value) of every candidate; None for one that was abandoned: it is shown without a height.
        chosen (`float`): the lambda that was chosen, one of the candidates with a value.
        path (`str` or `Path`): where to write, without a suffix.
        quantity (`str`): what the values are, with their unit: the label of the vertical axis.
        title (`str`, *optional*): what was pruned, and how.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: `chosen` has no value; a path with a suffix or in a folder that does not exist.
    """
    candidates = sorted(candidates, key=lambda candidate: candidate[0])
    values = {lam: value for lam, value in candidates if value is not None}
    if chosen not in values:
        raise ValueError(f"chosen={chosen} is none of the candidates with a value: {', '.join(map(str, values))}.")
    abandoned = [lam for lam, value in candidates if value is None]
    with new_figure(path, 3.6) as (figure, written):
        axes = figure.subplots()
        heights = [math.nan if value is None else value for _, value in candidates]
        axes.plot([lam for lam, _ in candidates], heights, "o-", color="black", ms=5, label="candidate")
        label = f"chosen: {chosen:g}"
        axes.plot([chosen], [values[chosen]], "D", color=COLOURS[4], mec="black", ms=11, label=label)
        if abandoned:
            # On the lower edge, since all that is known of them is that they lost.
            options = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 3}
            axes.plot(abandoned, [0.0] * len(abandoned), "x", color=GREY, mew=2, ms=8, label="abandoned", **options)
        axes.set(xlabel="Lambda: half-width of the sparsity window", ylabel=quantity)
        axes.margins(y=0.12)
        for axis in (axes.xaxis, axes.yaxis):
            show_rounded(axis)
        add_title(figure, title)
        add_legend(figure, axes.lines)
    return written
