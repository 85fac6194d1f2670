import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from example_figures import DRAWN, texts
from PIL import Image

from optimum_neuronal.comparing import plots
from optimum_neuronal.comparing.results import Result


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


def result(topup, saliency="wanda", **more):
    return Result(0.7, saliency, topup, {"c4": 30.0}, block_sparsity=[0.6, 0.8], pruning_seconds=1.0, **more)


def names(results, folder):
    dense = Result(0, "dense", "dense", {"c4": 20.0})
    paths = plots.plot_results("model", dense, results, folder)
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


def test_bits_are_drawn_where_there_are_several(tmp_path):
    """And figures of rows with bits do not take the place of those without."""
    results = [result("uniform", bits_per_weight=6.0), result("uniform", value_bits=4, bits_per_weight=2.4)]
    expected = ["perplexity-by-seconds.png", "perplexity-by-bits.png", "block-sparsity-wanda-70.png"]
    assert names(results, tmp_path) == [*expected, "block-sparsity-wanda-70-4bits.png"]
    assert "model, wanda, 70 % sparsity, 4 bits" in texts([None, tmp_path / "block-sparsity-wanda-70-4bits.svg"])
    assert "70 % sparsity, 4 bits" in texts([None, tmp_path / "perplexity-by-seconds.svg"])


def test_records_without_bits_are_not_drawn_by_bits(tmp_path):
    results = [result("uniform"), result("uniform", value_bits=4)]
    assert "perplexity-by-bits.png" not in names(results, tmp_path)


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


def test_titles_name_the_model_the_saliency_and_the_target(tmp_path):
    """So that no two figures are the same, even if all that they show is."""
    rows = {"row_sparsity": {"0.q_proj": [0.6, 0.8]}}
    results = [result("owl", saliency, **rows) for saliency in ("wanda", "ria")]
    names(results, tmp_path)
    pictures = [path.read_bytes() for path in tmp_path.glob("*.png")]
    assert len(set(pictures)) == len(pictures) == 5

    def title(name):
        return texts([None, tmp_path / f"{name}.svg"])

    assert "model, ria, 70 % sparsity" in title("block-sparsity-ria-70")
    assert "model, ria + owl, 70 % sparsity" in title("row-sparsity-ria-70-owl")
    assert "model: perplexity on c4" in title("perplexity-by-seconds")


def test_one_colour_per_method_and_one_scale_of_all_heat_maps(tmp_path, monkeypatch):
    styles, scales = [], []
    for name, found in (("plot_perplexity_by_seconds", styles), ("plot_block_sparsity", styles)):
        monkeypatch.setattr(plots, name, lambda *args, found=found, **more: found.append(more["styles"]) or [])
    monkeypatch.setattr(plots, "plot_row_sparsity", lambda *args, **more: scales.append(more["scale"]) or [])
    results = [
        Result(0.7, "ria", "uniform", error="no memory"),
        result("owl", "ria", row_sparsity={"0.q": [0.6, 0.8]}),
        result("uniform"),
        result("owl", row_sparsity={"0.q": [0.3, 0.7], "1.q": [0.9]}),
    ]
    names(results, tmp_path)
    assert len(styles) == 3 and all(style == styles[0] for style in styles) and list(styles[0]) == ["uniform", "owl"]
    assert scales == [(0.3, 0.9)] * 2


def test_a_method_of_many_words_has_a_file(tmp_path):
    lambdas = ",".join(f"0.{index}" for index in range(100))
    tuned = [f"neuronal:block_lambdas=[{lambdas},{last}]" for last in (0.3, 0.4)]
    rows = {"0.q_proj": [0.6, 0.8]}
    written = names([result(topup, row_sparsity=rows) for topup in tuned], tmp_path)
    assert len(set(written)) == 4 and max(map(len, written)) < 150
