"""Colours, markers and dashes: a style for each method, the same in all figures that are drawn together."""

from collections.abc import Iterable
from dataclasses import dataclass


# Okabe and Ito's palette and, after it, some of Tol's; distinguishable by the colour-blind.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#332288", "#661100",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 1)), (0, (4, 1)))
FACES = ("white", "#cccccc", "black")  # of markers, when the colours are used up for the first time, the second, ...
GREY = "#666666"
DENSE = {"color": "black", "ls": (0, (5, 2)), "lw": 1.4}  # the line of the dense model


@dataclass(frozen=True)
class Style:
    """How a method is drawn.

    Args:
        colour, marker: as matplotlib takes them.
        dashes: matplotlib's `linestyle`.
        face (`str`): what markers are filled with: the colour or, when colours return, another.
    """

    colour: str
    marker: str
    dashes: object
    face: str


def make_styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name, by the order of first appearance. Forty differ in colour or face."""
    styles = {}
    for number, name in enumerate(dict.fromkeys(names)):
        turn, again = number % len(COLOURS), number // len(COLOURS)
        shift = (number + again) % len(MARKERS)
        face = (COLOURS[turn], *FACES)[again % (1 + len(FACES))]
        styles[name] = Style(COLOURS[turn], MARKERS[shift], DASHES[shift], face)
    return styles
