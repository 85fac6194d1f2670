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
    """Returns what is written in every figure of a comparison, by the name of its file; `draw.figures` are the figures."""

    def draw(results, dense=DENSE, asked=()):
        written, draw.figures = {}, {}

        def savefig(figure, path):
            figure.draw_without_rendering()
            written[Path(path).stem] = [text.get_text() for text in figure.findobj(Text) if text.get_visible()]
            draw.figures[Path(path).stem] = figure

        monkeypatch.setattr(Figure, "savefig", savefig)
        paths = figures.draw_figures(tmp_path, "llama", dense, results, asked)
        assert [path.stem for path in paths] == list(written)
        return written

    return draw


def lines_of(figure):
    """Return the lines of a figure: name -> its matplotlib line, points and whether it has error bars."""
    containers = [container for axes in figure.axes for container in axes.containers]
    return {
        one.get_label(): (one.lines[0], [(x, round(float(y), 6)) for x, y in one.lines[0].get_xydata()], one.has_yerr)
        for one in containers
    }


def test_one_panel_per_sparsity_color_by_saliency_and_marker_by_top_up(drawn):
    found = [result(topup, saliency, sparsity) for sparsity in (0.8, 0.625) for saliency, topup in METHODS[1:]]
    written = drawn(found)["perplexity-by-seconds"]
    assert [text for text in written if text.endswith("sparsity")] == ["62.5% sparsity", "80% sparsity"]
    assert all(written.count(f"{saliency} + {topup}") == 1 for saliency, topup in METHODS[1:])
    assert "llama: geometric mean of perplexities on c4, wikitext2" in written and "dense model: 10" in written
    lines = lines_of(drawn.figures["perplexity-by-seconds"])
    looks = {name: (line.get_color(), line.get_marker()) for name, (line, *_) in lines.items()}
    assert looks["wanda + owl"][0] == looks["wanda + uniform"][0] != looks["multiflow + owl"][0]
    assert looks["wanda + owl"][1] == looks["multiflow + owl"][1] != looks["wanda + uniform"][1]
    drawn([result(topup) for topup in ("uniform", "owl")])
    alone = [line.get_color() for line, *_ in lines_of(drawn.figures["block-sparsity-wanda-70"]).values()]
    assert len({*alone}) == 2, "a single saliency's top-ups have colors of their own"


def test_over_one_saliency_the_seconds_are_the_top_ups(drawn):
    for others, label in (
        ([], "Seconds of the top-up"),
        ([result(saliency="ria")], "Seconds: allocation and pruning"),
        ([result("fast (alps + uniform)", "preset")], "Seconds: allocation and pruning"),
    ):
        assert label in drawn([result(), result("owl"), *others])["perplexity-by-seconds"]


def test_the_best_lines_and_what_was_asked_for(drawn, monkeypatch):
    monkeypatch.setattr(figures, "MOST_LINES", 3)
    ways = [result("owl", f"s{i}", 0.5 + s / 10, (20.0 + i, 20.0 + i)) for i in range(4) for s in range(3)]
    ways.append(result("owl", "best_at_one", 0.5, (1.0, 1.0)))
    for asked, last in (((), 3), (["s3+owl"], 2)):
        written = drawn(ways, asked=asked)
        names = {f"s{i} + owl" for i in range(last)} | {f"{text.partition('+')[0]} + owl" for text in asked}
        for figure in ("perplexity-by-sparsity", "perplexity-by-seconds"):
            assert set(lines_of(drawn.figures[figure])) == names and len(names) == 3
            assert any(text.endswith("on c4, wikitext2 (3 of 5 lines)") for text in written[figure])
    with pytest.raises(ValueError, match="line is 'alpha': expected one of 'best_at_one'"):
        drawn(ways, asked=["alpha"])
    drawn([result("best (alps + uniform)", "preset"), result("alpha_pruning")], asked=["best", "wanda+alpha_pruning"])


def test_a_comparison_gets_the_figures_that_it_allows(drawn):
    failed = Result(0.7, "ria", "uniform", error="no memory")
    found = drawn([result(), result("owl", "ria"), failed])
    assert {"wanda + uniform", "Decoder block", "Sparsity", "70%"} < set(found["block-sparsity-wanda-70"])
    assert list(found) == ["perplexity-by-seconds", "block-sparsity-wanda-70", "block-sparsity-ria-70"]
    assert "llama, ria, 70% sparsity" in found["block-sparsity-ria-70"]
    assert drawn([failed]) == {}
    long = drawn([result(saliency=f"ria:{'power=1.0,' * 100}")])
    assert max(map(len, long)) < 150, "a method of many words has a file"
    untested = drawn([result(perplexity=())], Result(0, "dense", "dense", {}))
    assert list(untested) == ["block-sparsity-wanda-70"]
    found = [result("owl", sparsity=sparsity) for sparsity in (0.1, 0.2, 0.3)]
    assert {"wanda + owl", "20%", "Sparsity of the pruned projections"} < set(drawn(found)["perplexity-by-sparsity"])
    assert "perplexity-by-sparsity" not in drawn(found[:2])


def block_step(lambdas, chosen, value=30.0, more="", **setting):
    args = {"steps": "block"} | ({"block_lambdas": lambdas} if lambdas else {})
    values = (value, 2 * value)
    config = {"topup_args": args}
    return result(
        f"neuronal, block step{more}", perplexity=values, block_lambda=chosen, config=config, setting=setting
    )


def test_lambdas_with_the_chosen_ones(drawn):
    """A line per test set, or per seed; a circle where a lambda was chosen from several. Choices alone make no figure."""
    name = "perplexity-by-neuronal-block-lambda-wanda-70"
    found = [block_step([lam], lam, 30 + lam) for lam in (0.05, 0.1, 0.2)]
    found += [block_step([], 0.1, 30.1), block_step([], 0.2, 30.2, ", metric=reconstruction")]
    written = drawn(found)[name]
    named = {"c4", "wikitext2", "chosen by the alignment", "chosen by the reconstruction error"}
    assert named | {"block lambda of neuronal"} < set(written)
    assert not [name for name in drawn(found[:2]) if "lambda" in name], "two lambdas make no figure"
    seeds = [block_step([], lam, seed=seed) for seed, lam in enumerate((0.05, 0.1, 0.2))]
    assert not [name for name in drawn(seeds) if "lambda" in name], "three seeds chose three lambdas"
    swept = [block_step([lam], lam, 30 + seed, seed=seed) for seed in (0, 1) for lam in (0.05, 0.1, 0.2)]
    drawn([*swept, *seeds])
    lines = lines_of(drawn.figures[name])
    assert list(lines) == ["seed 0", "seed 1"] and not any(has_bars for *_, has_bars in lines.values())
    (circles,) = [line for line in drawn.figures[name].axes[0].lines if line.get_label() == "chosen by the alignment"]
    assert circles.get_xdata().tolist() == [0.05, 0.1, 0.2]


def test_grids_and_sweeps(drawn):
    """A line per value of what else differs, words too; or per test set, if nothing does."""

    def owl(m, width):
        hyperparameters = {"outlier_factor": m, "half_width": width, "variant": "corrected" if m == 5 else "authors"}
        return result(f"owl, outlier_factor={m}, half_width={width}", config={"topup_args": hyperparameters})

    grid = [owl(m, width) for m in (3, 5) for width in (0.04, 0.08, 0.2)]
    written = drawn(grid)["perplexity-by-owl-half_width-wanda-70"]
    names = {"outlier_factor 3, variant authors", "outlier_factor 5, variant corrected"}
    assert names | {"half_width of owl", "Geometric mean of perplexities"} < set(written)
    sweep = [result("neuronal", setting={"num_alignment_samples": count, "seed": 3}) for count in (1, 2, 4)]
    written = drawn(sweep)["perplexity-by-neuronal-num_alignment_samples-wanda-70"]
    assert {"num_alignment_samples of neuronal", "c4"} < set(written)


def test_seeds_are_means_with_error_bars(drawn):
    seeds = []
    for count, values in ((1, (9.0, 5.0)), (2, (6.0, 7.0)), (4, (9.0, 9.0))):
        settings = [{"num_alignment_samples": count, "seed": seed} for seed in range(2)]
        seeds += [result(setting=s, perplexity=(v, v), block_sparsity=[None, v]) for s, v in zip(settings, values)]
    drawn(seeds)
    (_, by_block, has_bars) = lines_of(drawn.figures["block-sparsity-wanda-70"])["wanda + uniform"]
    assert by_block == [(1, 7.5)] and has_bars
    by_count = lines_of(drawn.figures["perplexity-by-uniform-num_alignment_samples-wanda-70"])["c4"]
    assert by_count[1:] == ([(1, 7.0), (2, 6.5), (4, 9.0)], True)


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
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib is missing: pip install 'optimum-neuronal\[report\]'"):
        draw_line(tmp_path / "a.png")
