import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from example_figures import DRAWN
from PIL import Image

from optimum_neuronal.evaluation import plots
from optimum_neuronal.evaluation.results import Comparison, Result


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
class TestFiles:
    def test_png_and_svg(self, draw, tmp_path):
        paths = draw(tmp_path / "wanda-0.7")
        assert [path.name for path in paths] == ["wanda-0.7.png", "wanda-0.7.svg"]
        assert sorted(tmp_path.iterdir()) == paths
        with Image.open(paths[0]) as image:
            image.load()
            assert image.format == "PNG" and image.width == 1200 and len(image.getcolors(1 << 24)) > 10
        assert ElementTree.parse(paths[1]).getroot().tag.endswith("svg")

    def test_equal_data_give_equal_files(self, draw, tmp_path):
        first, second = draw(str(tmp_path / "first")), draw(str(tmp_path / "second"))
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]

    def test_nothing_global_matters_or_changes(self, draw, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
        before = draw(tmp_path / "before")[0].read_bytes()
        with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
            settings = matplotlib.rcParams.copy()
            assert draw(tmp_path / "after")[0].read_bytes() == before
            assert matplotlib.rcParams.copy() == settings

    def test_paths(self, draw, tmp_path):
        with pytest.raises(ValueError, match="ends in '.png': leave it out"):
            draw(tmp_path / "figure.png")
        with pytest.raises(ValueError, match="absent' does not exist"):
            draw(tmp_path / "absent" / "figure")
        assert not list(tmp_path.iterdir())

    def test_matplotlib_is_not_installed(self, draw, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[report\]"):
            draw(tmp_path / "figure")


def result(topup, **more):
    return Result(0.7, "wanda", topup, {"c4": 30.0}, block_sparsity=[0.6, 0.8], pruning_seconds=1.0, **more)


def names(results, folder):
    dense = Result(0, "dense", "dense", {"c4": 20.0})
    paths = plots.plot_comparison(Comparison("model", dense, results, {}, {}), folder)
    assert sorted(paths) == sorted(folder.iterdir())
    return [path.name for path in paths if path.suffix == ".png"]


def test_a_comparison_gets_the_figures_that_it_allows(tmp_path):
    rows = {"0.q_proj": [0.6, 0.8]}
    failed = Result(0.7, "ria", "uniform", error="no memory")
    written = names([result("uniform"), result("neuronal:steps=row", row_sparsity=rows), failed], tmp_path)
    assert written == [
        "perplexity-by-seconds.png",
        "block-sparsity-wanda-70.png",
        "row-sparsity-wanda-70-neuronal_steps_row.png",
    ]


def test_lambdas_are_drawn_where_there_are_three_and_a_choice_among_several(tmp_path):
    def single(lam, tried=1):
        return result(f"neuronal:{lam}-{tried}", block_lambda=lam, decisions={"block": {"candidates": [{}] * tried}})

    results = [single(0.05), single(0.1), single(0.2), single(0.1, tried=3)]
    assert "lambda-wanda-70.png" in names(results, tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert "lambda-wanda-70.png" not in names(results[:3], tmp_path)


def test_a_comparison_that_failed_throughout_has_no_figure(tmp_path):
    assert names([Result(0.7, "wanda", "uniform", error="no memory")], tmp_path) == []
