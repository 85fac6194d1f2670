import sys

import pytest
from example_figures import texts

from optimum_neuronal.evaluation.figures.canvas import (
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
        add_legend(figure, axes)
        assert figure.get_size_inches().tolist() == pytest.approx([WIDTH, 2 + 0.25 * lines])
    assert set(names) <= set(texts(written))


def test_shares():
    check_shares({"x": [0.0, 1.0]})
    for series in ({}, {"x": []}, {"x": [-0.1]}, {"x": [0.5, float("nan")]}):
        with pytest.raises(ValueError):
            check_shares(series)
