import itertools
import sys
import xml.etree.ElementTree as ElementTree
from io import BytesIO

import matplotlib
import pytest
from example_figures import DRAWN, HARD, texts
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from optimum_neuronal.common.figure_style import (
    WIDTH,
    add_legend,
    check_matplotlib,
    make_styles,
    new_figure,
    show_percent,
    show_round_numbers,
)


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_files(draw, monkeypatch):
    """Equal data give equal files; nothing global matters or changes."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    files = draw()
    with Image.open(BytesIO(files[".png"])) as image:
        image.load()
        assert image.format == "PNG" and image.width == 1200 and len(image.getcolors(1 << 24)) > 10
    assert ElementTree.fromstring(files[".svg"]).tag.endswith("svg")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        settings = matplotlib.rcParams.copy()
        assert draw() == files
        assert matplotlib.rcParams.copy() == settings


def test_matplotlib_is_not_installed(monkeypatch):
    check_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (check_matplotlib, *DRAWN.values()):
        with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[report\]"):
            draw()


def test_shares_are_shown_in_per_cent():
    with new_figure(2) as (figure, files):
        axes = figure.subplots()
        axes.plot([0, 1], [0.0, 0.625])
        axes.set_yticks([0, 0.625])
        show_percent(axes.yaxis)
    assert {"0 %", "62.5 %"} <= set(texts(files))


def test_a_legend_makes_the_figure_taller_by_its_lines():
    for names, lines in ((["a", "b"], 1), (["a" * 60, "b", "c"], 3)):
        with new_figure(2) as (figure, files):
            axes = figure.subplots()
            for name in names:
                axes.plot([0, 1], [0, 1], label=name)
            add_legend(figure, axes.lines)
            assert figure.get_size_inches().tolist() == pytest.approx([WIDTH, 2 + 0.25 * lines])
        assert set(names) <= set(texts(files))


def test_forty_methods_differ_and_depend_on_their_order_alone():
    names = [f"method {index}" for index in range(40)]
    styles = make_styles(names)
    assert len({(style["color"], style["mfc"]) for style in styles.values()}) == 40
    assert make_styles(["b", "a", "b"]) == make_styles(["b", "a"]) and make_styles(["b"])["b"] == styles[names[0]]


def test_at_least_three_ticks_on_a_log_axis():
    for low, times in itertools.product([1e-3, 0.7, 9.9, 31.4, 2e5], [1.001, 1.1, 2, 7, 13, 1e3, 1e15]):
        axes = Figure().subplots()
        axes.set(yscale="log", ylim=(low, low * times))
        show_round_numbers(axes.yaxis)
        ticks = [tick for tick in axes.get_yticks() if low <= tick <= low * times]
        assert 3 <= len(ticks) <= 10, (low, times, ticks)


@pytest.mark.parametrize("draw", HARD.values(), ids=HARD)
def test_nothing_overlaps_and_every_scale_has_three_ticks(draw, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    draw()
    renderer = FigureCanvasAgg(figures[0]).get_renderer()
    figures[0].draw_without_rendering()
    shown = [text for text in figures[0].findobj(Text) if text.get_visible() and text.get_text().strip()]
    scales = [axis for axes in figures[0].axes for axis in (axes.xaxis, axes.yaxis)]
    hidden = {label for axis in scales for label in _outside(axis)}
    boxes = {text: text.get_window_extent(renderer) for text in shown if text not in hidden}
    for (one, box), (other, another) in itertools.combinations(boxes.items(), 2):
        assert not box.padded(-1).overlaps(another), (one.get_text(), other.get_text())
    whole = figures[0].bbox.padded(1)
    for text, box in boxes.items():
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1, text
    for axis in scales:
        numbers = [label.get_text() for label in _labels(axis) if label.get_text()]
        assert not numbers or len(numbers) >= 3, numbers
    assert {text.get_fontsize() for text in boxes} == {11.0}, "titles and labels are as large"
    places = {round(boxes[label].x0) for axes in figures[0].axes if (label := axes.yaxis.label) in boxes}
    assert len(places) <= 1, "the labels of all panels are aligned"


def _labels(axis):
    """Return the labels of ticks within the axis' limits, hence shown."""
    low, high = sorted(axis.get_view_interval())
    spare = 1e-9 * (high - low)
    return [tick.label1 for tick in axis.get_major_ticks() if low - spare <= tick.get_loc() <= high + spare]


def _outside(axis):
    shown = _labels(axis)
    return [label for tick in axis.get_major_ticks() for label in (tick.label1, tick.label2) if label not in shown]
