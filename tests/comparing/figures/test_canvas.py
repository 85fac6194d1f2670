import itertools
import sys

import pytest
from example_figures import HARD, texts
from matplotlib.figure import Figure
from matplotlib.text import Text

from optimum_neuronal.comparing.figures.canvas import (
    WIDTH,
    add_legend,
    check_matplotlib,
    check_shares,
    new_figure,
    show_percent,
)


def test_matplotlib_is_checked_beforehand(monkeypatch):
    check_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[report\]"):
        check_matplotlib()


def test_nothing_is_written_of_a_figure_that_fails(tmp_path):
    with pytest.raises(RuntimeError), new_figure(tmp_path / "figure", 2):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_shares_are_shown_in_per_cent(tmp_path):
    with new_figure(tmp_path / "figure", 2) as (figure, written):
        axes = figure.subplots()
        axes.plot([0, 1], [0.0, 0.625])
        axes.set_yticks([0, 0.625])
        show_percent(axes.yaxis, digits=3)
    assert {"0 %", "62.5 %"} <= set(texts(written))


@pytest.mark.parametrize("names, lines", [(["a", "b"], 1), (["a" * 60, "b", "c"], 3)])
def test_a_legend_makes_the_figure_taller_by_its_lines(names, lines, tmp_path):
    with new_figure(tmp_path / "figure", 2) as (figure, written):
        axes = figure.subplots()
        for name in names:
            axes.plot([0, 1], [0, 1], label=name)
        add_legend(figure, axes.lines)
        assert figure.get_size_inches().tolist() == pytest.approx([WIDTH, 2 + 0.25 * lines])
    assert set(names) <= set(texts(written))


def test_shares():
    check_shares({"x": [0.0, 1.0]})
    for series in ({}, {"x": []}, {"x": [-0.1]}, {"x": [0.5, float("nan")]}):
        with pytest.raises(ValueError):
            check_shares(series)


@pytest.mark.parametrize("draw", HARD.values(), ids=HARD)
def test_nothing_overlaps_and_every_scale_has_three_ticks(draw, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    draw(tmp_path / "figure")
    figures[0].draw_without_rendering()
    renderer = figures[0].canvas.get_renderer()
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
    """Those of ticks that are within the axis' limits, hence shown."""
    low, high = sorted(axis.get_view_interval())
    spare = 1e-9 * (high - low)
    return [tick.label1 for tick in axis.get_major_ticks() if low - spare <= tick.get_loc() <= high + spare]


def _outside(axis):
    shown = _labels(axis)
    return [label for tick in axis.get_major_ticks() for label in (tick.label1, tick.label2) if label not in shown]
