import itertools
import math
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from optimum_neuronal.evaluation.figures import perplexity_by_seconds as plots
from optimum_neuronal.evaluation.figures.perplexity_by_seconds import (
    BINS,
    plot_block_sparsity,
    plot_lambda_curve,
    plot_perplexity_by_seconds,
    plot_row_sparsity,
)


METHODS = list(itertools.product(("magnitude", "wanda", "multiflow"), ("uniform", "owl", "neuronal")))


def run(saliency="wanda", topup="uniform", sparsity=0.7, perplexity=(20.0, 45.0), seconds=(1.0, 2.0), **more):
    perplexity = dict(zip(("wikitext2", "c4"), perplexity))
    values = {"saliency": saliency, "topup": topup, "sparsity": sparsity, "perplexity": perplexity}
    return values | {"allocation_seconds": seconds[0], "pruning_seconds": seconds[1]} | more


def runs(sparsities=(0.6, 0.7, 0.8)):
    """Close together, as real ones are."""
    return [
        run(*method, sparsity, (30 + index, 40 + index), (0.1 * index, 3.0))
        for sparsity in sparsities
        for index, method in enumerate(METHODS)
    ]


LAYER = {
    f"model.layers.{block}.{name}": [0.5 + 0.01 * block] * rows
    for block in range(4)
    for name, rows in (("self_attn.q_proj", 100), ("mlp.down_proj", 10))
}
DRAWN = {
    "perplexity": lambda path: plot_perplexity_by_seconds(runs(), path),
    "lambda": lambda path: plot_lambda_curve([(0.1, 1.5), (0.05, 2.0), (0.2, None)], 0.1, path, "Alignment error"),
    "blocks": lambda path: plot_block_sparsity({"uniform": [0.7] * 40, "neuronal": np.linspace(0.6, 0.8, 40)}, path),
    "rows": lambda path: plot_row_sparsity(LAYER, path),
}


def texts(paths):
    """What is written in a figure's SVG."""
    return ["".join(text.itertext()) for text in ElementTree.parse(paths[1]).iter("{http://www.w3.org/2000/svg}text")]


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


def test_matplotlib_is_checked_beforehand(monkeypatch):
    plots.check_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[report\]"):
        plots.check_matplotlib()


class TestPerplexityBySeconds:
    def test_one_panel_per_sparsity_one_name_per_method(self, tmp_path):
        written = texts(plot_perplexity_by_seconds(runs((0.8, 0.625)), tmp_path / "figure"))
        assert [text for text in written if text.endswith("sparsity")] == ["62.5 % sparsity", "80 % sparsity"]
        for saliency, topup in METHODS:
            assert written.count(f"{saliency} + {topup}") == 2
        assert "Perplexity: geometric mean over c4, wikitext2" in written
        assert "Runtime in seconds: allocation and pruning" in written

    def test_where_a_point_lies(self):
        assert plots._point(run(perplexity=(20.0, 45.0), seconds=(1.0, 2.5))) == (3.5, pytest.approx(30.0))
        assert plots._point(run(seconds=(None, 2.5)))[0] == 2.5

    def test_what_failed_is_left_out_and_what_is_infinite_named(self, tmp_path):
        failed = {"saliency": "wanda", "topup": "owl", "sparsity": 0.9, "error": "no memory"}
        results = [run(), failed, run("magnitude", perplexity=(math.inf, 50.0))]
        written = texts(plot_perplexity_by_seconds(results, tmp_path / "figure"))
        assert "70 % sparsity (infinite: magnitude + uniform)" in written
        assert "wanda + uniform" in written and "magnitude + uniform" not in written
        assert not any("owl" in text or "90" in text for text in written)

    def test_one_dataset_and_nothing_but_infinite(self, tmp_path):
        written = texts(plot_perplexity_by_seconds([run(perplexity=(math.inf,))], tmp_path / "figure"))
        assert "Perplexity on wikitext2" in written

    @pytest.mark.parametrize("seed", range(2))
    def test_names_cover_neither_points_nor_names(self, seed, tmp_path):
        """As many as three dozen, scattered at random over the panel."""
        positions = np.random.default_rng(seed).uniform(1, 1.2, (36, 2))
        with plots._figure(tmp_path / "figure", 5) as (figure, _):
            panel = figure.subplots()
            for index, (x, y) in enumerate(positions):
                panel.plot([x], [y], "o", ms=9, label=f"method {index}")
            panel.margins(0.14)
            plots._label_points(figure, [panel])
            renderer = figure.canvas.get_renderer()
            boxes = [text.get_bbox_patch() or text for text in panel.texts]
            boxes = [super(type(text), text).get_window_extent(renderer) for text in boxes]  # less the leading line
            points = panel.transData.transform(positions)
            inside = panel.get_window_extent(renderer).padded(3)
        assert len(boxes) == 36
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        for box in boxes:
            assert not any(box.contains(*point) for point in points)
            assert inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)

    @pytest.mark.parametrize(
        "low, high, ticks",
        [
            (0.5, 2000, [1, 10, 100, 1000]),
            (8, 110, [10, 30, 100]),
            (39, 62, [40, 50, 60]),
            (50.1, 52.4, [51, 52]),
            (3.02, 3.08, [3.02, 3.08]),
        ],
    )
    def test_ticks(self, low, high, ticks):
        assert plots._log_ticks(low, high) == ticks

    def test_at_most_ten_ticks(self):
        assert 5 <= len(plots._log_ticks(1e-3, 1e12)) <= 10

    @pytest.mark.parametrize(
        "results, match",
        [
            ([], "no run without an error"),
            ([run(error="no memory")], "no run without an error"),
            ([run(), run(perplexity=(20.0,))], "the same datasets, but got: c4, wikitext2; wikitext2"),
            ([run(seconds=(0.0, None))], "wanda [+] uniform at 0.7 took 0.0 seconds"),
            ([run(perplexity=(0.5, 20.0))], "a perplexity is at least 1"),
            ([run(perplexity=(math.nan, 20.0))], "a perplexity is at least 1"),
        ],
    )
    def test_errors(self, results, match, tmp_path):
        with pytest.raises(ValueError, match=match):
            plot_perplexity_by_seconds(results, tmp_path / "figure")


class TestLambdaCurve:
    def test_labels(self, tmp_path):
        written = texts(DRAWN["lambda"](tmp_path / "figure"))
        assert {"Alignment error", "candidate", "chosen: 0.1", "abandoned"} < set(written)
        written = texts(plot_lambda_curve([(0.1, 1.5)], 0.1, tmp_path / "figure", "Perplexity"))
        assert "abandoned" not in written

    @pytest.mark.parametrize("chosen", [0.2, 0.3])
    def test_chosen_has_no_value(self, chosen, tmp_path):
        with pytest.raises(ValueError, match="none of the candidates with a value: 0.05, 0.1"):
            plot_lambda_curve([(0.1, 1.5), (0.05, 2.0), (0.2, None)], chosen, tmp_path / "figure", "x")


class TestBlockSparsity:
    def test_labels(self, tmp_path):
        written = texts(DRAWN["blocks"](tmp_path / "figure"))
        assert {"uniform", "neuronal", "Decoder block", "Sparsity", "70 %"} < set(written)

    def test_more_methods_than_colours(self, tmp_path):
        names = [f"a rather long name of a method, number {index}" for index in range(20)]
        written = texts(plot_block_sparsity({name: [0.5, 0.6] for name in names}, tmp_path / "figure"))
        assert set(names) < set(written)

    @pytest.mark.parametrize(
        "by_method, match",
        [
            ({}, "nothing to draw"),
            ({"uniform": []}, "'uniform' has no sparsities"),
            ({"uniform": [0.5, 1.1]}, "'uniform' has sparsities outside"),
            ({"uniform": [math.nan]}, "'uniform' has sparsities outside"),
            ({"uniform": [0.5], "owl": [0.5, 0.5]}, "different numbers of blocks .uniform: 1, owl: 2"),
        ],
    )
    def test_errors(self, by_method, match, tmp_path):
        with pytest.raises(ValueError, match=match):
            plot_block_sparsity(by_method, tmp_path / "figure")


class TestRowSparsity:
    def test_labels(self, tmp_path):
        written = texts(DRAWN["rows"](tmp_path / "figure"))
        assert {"0.self_attn.q_proj", "3.mlp.down_proj", "Row sparsity", "50 %", "53 %"} < set(written)

    def test_all_rows_alike(self, tmp_path):
        written = texts(plot_row_sparsity({"lm.layers.7.mlp.up_proj": [0.7] * 3}, tmp_path / "figure"))
        assert {"7.mlp.up_proj", "69.5 %", "70 %", "70.5 %"} < set(written)

    def test_bins(self):
        shares = np.arange(2 * BINS) / (2 * BINS)
        assert plots._binned(shares) == pytest.approx(shares.reshape(BINS, 2).mean(1))
        few = plots._binned(np.array([0.1, 0.2]))
        assert few == pytest.approx([0.1] * (BINS // 2) + [0.2] * (BINS // 2))
        assert plots._binned(np.linspace(0, 1, 1000)).mean() == pytest.approx(0.5)
        assert plots._binned(np.array([0.1, 0.2, 0.3])).shape == (BINS,)

    def test_many_are_named_by_block(self):
        names = [f"h.{block}.{part}" for block in range(40) for part in ("attn.c_attn", "attn.c_proj")]
        places, texts = plots._row_names(names)
        assert places == list(range(0, 81, 2)) and texts[:2] == ["block 0", "block 1"] and len(texts) == 40

    def test_many_blocks_are_named_together(self):
        places, texts = plots._row_names([f"h.{block}.c_proj" for block in range(101)])
        assert places == [*range(0, 101, 2), 101]
        assert texts[:2] == ["block 0 to 1", "block 2 to 3"] and texts[-1] == "block 100"

    @pytest.mark.parametrize(
        "names, short",
        [
            (["a.b.0.x.y", "a.b.1.x.y"], ["0.x.y", "1.x.y"]),
            (["a.b.0.x.y", "a.b.0.z.y"], ["0.x.y", "0.z.y"]),
            (["a.x.y", "b.x.y"], ["a.x.y", "b.x.y"]),
            (["a.0"], ["a.0"]),
            (["x"], ["x"]),
        ],
    )
    def test_short_names(self, names, short):
        assert plots._shortened(names) == short

    def test_errors(self, tmp_path):
        with pytest.raises(ValueError, match="nothing to draw"):
            plot_row_sparsity({}, tmp_path / "figure")
        with pytest.raises(ValueError, match="'x' has sparsities outside"):
            plot_row_sparsity({"x": [2.0]}, tmp_path / "figure")
