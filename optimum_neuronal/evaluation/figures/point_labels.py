"""Names beside points: each at the nearest place where it covers neither a point nor another name."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .canvas import GREY


def label_points(figure, panels: Sequence) -> None:
    """Writes every point's name beside it, at the nearest place where it covers neither a point nor a name."""
    figure.draw_without_rendering()  # only now it is known where the points lie
    figure.set_layout_engine("none")
    renderer = figure.canvas.get_renderer()
    for panel in panels:
        inside = panel.get_window_extent(renderer).extents
        points = [(*panel.transData.transform(line.get_xydata()[0]), line.get_label()) for line in panel.lines]
        taken = [_around(x, y, 16, 16) for x, y, _ in points]
        # From left to right, so that the same points give the same figure in any order.
        for x, y, name in sorted(points):
            position = panel.transData.inverted().transform((x, y))
            style = {"arrowstyle": "-", "color": GREY, "lw": 0.8, "shrinkA": 0, "shrinkB": 5}
            label = panel.annotate(
                name, position, textcoords="data", fontsize="small", ha="center", va="center", arrowprops=style
            )
            extent = label.get_window_extent(renderer)
            # Of equal costs min takes the first place, which is the nearest.
            places = list(_places(x, y, extent.width + 4, extent.height + 2))
            far, box = min(places, key=lambda place: _overlap(place[1], taken, inside))
            taken.append(box)
            label.xyann = panel.transData.inverted().transform((box[:2] + box[2:]) / 2)
            label.arrow_patch.set_visible(far)


def _places(x: float, y: float, width: float, height: float) -> Iterator[tuple[bool, np.ndarray]]:
    """Boxes beside a point, the nearest first, and whether one is so far away that a line has to lead to it."""
    for distance in (10, 16, 24, 34, 46, 60, 80, 100):
        for turn in (0, 8, 4, 12, 2, 14, 6, 10, 1, 15, 7, 9, 3, 13, 5, 11):  # to the right and to the left first
            across, up = math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)
            centre = x + across * (distance + width / 2), y + up * (distance + height / 2)
            yield distance > 16, _around(*centre, width, height)


def _around(x: float, y: float, width: float, height: float) -> np.ndarray:
    """A box by its centre: left, lower, right and upper edge."""
    return np.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2])


def _overlap(box: np.ndarray, taken: list[np.ndarray], inside: np.ndarray) -> float:
    """Area that a box shares with others or has outside of the panel, in square pixels."""

    def shared(other: np.ndarray) -> float:
        sides = np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2])
        return float(sides.clip(0).prod())

    return sum(map(shared, taken)) + float((box[2:] - box[:2]).prod()) - shared(inside)
