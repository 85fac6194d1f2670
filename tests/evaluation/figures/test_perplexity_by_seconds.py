import math

import pytest
from example_figures import METHODS, run, runs, texts

from optimum_neuronal.evaluation.figures.perplexity_by_seconds import _log_ticks, _point, plot_perplexity_by_seconds


def test_one_panel_per_sparsity_one_name_per_method(tmp_path):
    written = texts(plot_perplexity_by_seconds(runs((0.8, 0.625)), tmp_path / "figure"))
    assert [text for text in written if text.endswith("sparsity")] == ["62.5 % sparsity", "80 % sparsity"]
    for saliency, topup in METHODS:
        assert written.count(f"{saliency} + {topup}") == 2
    assert "Perplexity: geometric mean over c4, wikitext2" in written
    assert "Runtime in seconds: allocation and pruning" in written


def test_where_a_point_lies():
    assert _point(run(perplexity=(20.0, 45.0), seconds=(1.0, 2.5))) == (3.5, pytest.approx(30.0))
    assert _point(run(seconds=(None, 2.5)))[0] == 2.5


def test_what_failed_is_left_out_and_what_is_infinite_named(tmp_path):
    failed = {"saliency": "wanda", "topup": "owl", "sparsity": 0.9, "error": "no memory"}
    results = [run(), failed, run("magnitude", perplexity=(math.inf, 50.0))]
    written = texts(plot_perplexity_by_seconds(results, tmp_path / "figure"))
    assert "70 % sparsity (infinite: magnitude + uniform)" in written
    assert "wanda + uniform" in written and "magnitude + uniform" not in written
    assert not any("owl" in text or "90" in text for text in written)


def test_one_dataset_and_nothing_but_infinite(tmp_path):
    written = texts(plot_perplexity_by_seconds([run(perplexity=(math.inf,))], tmp_path / "figure"))
    assert "Perplexity on wikitext2" in written


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
def test_ticks(low, high, ticks):
    assert _log_ticks(low, high) == ticks


def test_at_most_ten_ticks():
    assert 5 <= len(_log_ticks(1e-3, 1e12)) <= 10


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
def test_errors(results, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        plot_perplexity_by_seconds(results, tmp_path / "figure")
