"""What is written in the figures of a comparison."""

import itertools
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from optimum_neuronal.comparing import figures
from optimum_neuronal.comparing.results import Result


METHODS = list(itertools.product(("magnitude", "wanda", "multiflow"), ("uniform", "owl", "neuronal")))
DENSE = Result(0.0, "dense", "dense", {"c4": 5.0, "wikitext2": 20.0})


def result(topup="uniform", saliency="wanda", sparsity=0.7, perplexity=(45.0, 20.0), **more):
    perplexity = dict(zip(("c4", "wikitext2"), perplexity))
    times = {"allocation_seconds": 1.0, "pruning_seconds": 2.0}
    return Result(sparsity, saliency, topup, perplexity, **times, **{"block_sparsity": [sparsity] * 4, **more})


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Returns what is written in every figure of a comparison, by the name of its file."""

    def draw(results, dense=DENSE):
        written = {}

        def savefig(figure, path):
            figure.draw_without_rendering()
            written[Path(path).stem] = [text.get_text() for text in figure.findobj(Text) if text.get_visible()]

        monkeypatch.setattr(Figure, "savefig", savefig)
        paths = figures.draw_figures(tmp_path, "llama", dense, results)
        assert [path.stem for path in paths] == list(written)
        return written

    return draw


def test_one_panel_per_sparsity_one_name_per_method(drawn):
    found = [result(topup, saliency, sparsity) for sparsity in (0.8, 0.625) for saliency, topup in METHODS]
    written = drawn(found)["perplexity-by-seconds"]
    assert [text for text in written if text.endswith("sparsity")] == ["62.5% sparsity", "80% sparsity"]
    saliencies, topups = zip(*METHODS)
    for name in {f"saliency {saliency}" for saliency in saliencies} | set(topups):
        assert written.count(name) == 1
    assert "llama: geometric mean of perplexities on c4, wikitext2" in written and "dense model: 10" in written
    one = drawn([result(), result()])["perplexity-by-seconds"]
    assert not [text for text in one if "saliency" in text], "one needs no gray marker"


def test_over_one_saliency_the_seconds_are_the_top_ups(drawn):
    for others, label in (
        ([], "Seconds of the top-up"),
        ([result(saliency="ria")], "Seconds: allocation and pruning"),
        ([result("fast (alps + uniform)", "preset")], "Seconds: allocation and pruning"),
    ):
        assert label in drawn([result(), result("owl"), *others])["perplexity-by-seconds"]


def test_more_methods_than_colors_have_no_figure_by_seconds(drawn):
    found = [result(f"owl, half_width={index}") for index in range(len(figures.COLORS) + 1)]
    assert "perplexity-by-seconds" in drawn(found[1:]) and "perplexity-by-seconds" not in drawn(found)


def test_a_comparison_gets_the_figures_that_it_allows(drawn):
    failed = Result(0.7, "ria", "uniform", error="no memory")
    found = drawn([result(), result("owl", "ria"), failed])
    assert {"uniform", "Decoder block", "Sparsity", "70.0%"} < set(found["block-sparsity-wanda-70"])
    assert list(found) == ["perplexity-by-seconds", "block-sparsity-wanda-70", "block-sparsity-ria-70"]
    assert "llama, ria, 70% sparsity" in found["block-sparsity-ria-70"]
    assert drawn([failed]) == {}
    long = drawn([result(saliency=f"ria:{'power=1.0,' * 100}")])
    assert max(map(len, long)) < 150, "a method of many words has a file"
    untested = drawn([result(perplexity=())], Result(0, "dense", "dense", {}))
    assert list(untested) == ["block-sparsity-wanda-70"]
    found = [result("owl", sparsity=sparsity) for sparsity in (0.1, 0.2, 0.3)]
    assert {"wanda + owl", "20.0%", "Sparsity of the pruned projections"} < set(drawn(found)["perplexity-by-sparsity"])
    assert "perplexity-by-sparsity" not in drawn(found[:2])


def block_step(lam, *candidates, value=30.0, more=""):
    decisions = {"block": {"lambda": lam, "candidates": [{"lambda": other} for other in candidates or (lam,)]}}
    topup = f"neuronal, sequence, block step{more}"
    return result(topup, perplexity=(value, 2 * value), block_lambda=lam, decisions=decisions)


def test_lambdas_with_the_chosen_ones(drawn):
    """A line per test set; a circle where a lambda was chosen from several."""
    found = [block_step(lam, value=30 + lam) for lam in (0.05, 0.1, 0.2)]
    found.append(block_step(0.1, 0.05, 0.1, value=30.1))
    found.append(block_step(0.2, 0.05, 0.2, value=30.2, more=", metric=reconstruction"))
    written = drawn(found)["perplexity-by-neuronal-block-lambda-wanda-70"]
    named = {"c4", "wikitext2", "chosen by the alignment", "chosen by the reconstruction error"}
    assert named | {"block lambda of neuronal"} < set(written)
    assert not [name for name in drawn(found[:2]) if "lambda" in name], "two lambdas make no figure"


def test_grids_and_sweeps(drawn):
    """A line per value of the second hyperparameter; or per test set, if there is none."""

    def owl(m, width):
        hyperparameters = {"outlier_factor": m, "half_width": width}
        return result(f"owl, outlier_factor={m}, half_width={width}", config={"topup_args": hyperparameters})

    grid = [owl(m, width) for m in (3, 5) for width in (0.04, 0.08, 0.2)]
    written = drawn(grid)["perplexity-by-owl-half_width-wanda-70"]
    assert {"half_width of owl", "outlier_factor=3", "outlier_factor=5"} < set(written)
    sweep = [result("neuronal", setting={"num_alignment_samples": count, "seed": 3}) for count in (1, 2, 4)]
    written = drawn(sweep)["perplexity-by-neuronal-num_alignment_samples-wanda-70"]
    assert {"num_alignment_samples of neuronal", "c4"} < set(written)


def test_seeds_are_averaged(tmp_path, monkeypatch):
    drawn, seeds = [], []
    monkeypatch.setattr(figures, "plot_lines", lambda path, title, lines, *_, **__: (drawn.append(lines), path)[1])
    for count, values in ((1, (9.0, 5.0)), (2, (6.0, 7.0)), (4, (9.0, 9.0))):
        settings = [{"num_alignment_samples": count, "seed": seed} for seed in range(2)]
        seeds += [result(setting=s, perplexity=(v, v), block_sparsity=[None, v]) for s, v in zip(settings, values)]
    figures.draw_figures(tmp_path, "model", DENSE, seeds)
    by_block, by_count = drawn
    assert by_block == {"uniform": [(1, 7.5)]} and by_count["c4"] == [(1, 7.0), (2, 6.5), (4, 9.0)]


def draw_line(path):
    with figures.new_figure(path, 2, "A title") as figure:
        figure.subplots().plot([0, 1], [0.0, 0.625])
    return path.read_bytes()


def test_equal_data_give_equal_files_whatever_the_users_settings(tmp_path):
    content = draw_line(tmp_path / "new" / "one.png")
    with Image.open(tmp_path / "new" / "one.png") as image:
        assert image.format == "PNG" and 1100 < image.width < 1300
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        settings = matplotlib.rcParams.copy()
        assert draw_line(tmp_path / "two.png") == content
        assert matplotlib.rcParams.copy() == settings


def test_matplotlib_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for call in (figures.check_matplotlib, lambda: draw_line(tmp_path / "a.png")):
        with pytest.raises(ImportError, match=r"pip install 'optimum-neuronal\[report\]'"):
            call()
