import math

import pytest
from example_figures import METHODS, run, runs, texts

from optimum_neuronal.comparing.figures.perplexity_by_seconds import _point, plot_perplexity_by_seconds


def test_one_panel_per_sparsity_one_name_per_method(tmp_path):
    written = texts(plot_perplexity_by_seconds(runs((0.8, 0.625)), tmp_path / "figure"))
    assert [text for text in written if text.endswith("sparsity")] == ["62.5 % sparsity", "80 % sparsity"]
    for name in {name for method in METHODS for name in method}:
        assert written.count(name) == 1
    assert "Perplexity (geometric mean of c4, wikitext2)" in written
    assert "Runtime in seconds: allocation and pruning" in written


def test_where_a_point_lies():
    assert _point(run(perplexity=(20.0, 45.0), seconds=(1.0, 2.5))) == (3.5, pytest.approx(30.0))
    assert _point(run(seconds=(None, 2.5)))[0] == 2.5


def test_what_failed_is_left_out_and_what_is_infinite_named(tmp_path):
    failed = {"saliency": "wanda", "topup": "owl", "sparsity": 0.9, "error": "no memory"}
    results = [run(), failed, run("magnitude", perplexity=(math.inf, 50.0))]
    written = texts(plot_perplexity_by_seconds(results, tmp_path / "figure"))
    assert "70 % sparsity (infinite: magnitude + uniform)" in written
    assert not any("owl" in text or "90" in text for text in written)


def test_one_dataset_and_nothing_but_infinite(tmp_path):
    written = texts(plot_perplexity_by_seconds([run(perplexity=(math.inf,))], tmp_path / "figure"))
    assert "wanda: perplexity on wikitext2" in written


def test_the_dense_model_is_a_line(tmp_path):
    drawn = plot_perplexity_by_seconds(runs(), tmp_path / "figure", title="llama", dense={"wikitext2": 20, "c4": 5})
    written = texts(drawn)
    assert "dense model: 10" in written and "llama: perplexity (geometric mean of c4, wikitext2)" in written
    assert "dense" not in " ".join(texts(plot_perplexity_by_seconds(runs(), tmp_path / "figure")))


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
