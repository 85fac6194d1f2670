import math

import pytest
from example_figures import run, runs_with_bits, texts

from optimum_neuronal.comparing.figures.perplexity_by_bits import _lines, plot_perplexity_by_bits


def test_one_line_for_each_method_and_number_of_bits():
    lines = _lines(runs_with_bits(("uniform",)))
    assert [key[2] for key in lines] == [None, 4, 3] and all(len(points) == 2 for points in lines.values())
    assert lines["alps", "uniform", 4][0] == (3.0, pytest.approx((30 * 56) ** 0.5))


def test_what_is_written(tmp_path):
    drawn = plot_perplexity_by_bits(
        runs_with_bits(), tmp_path / "bits", title="llama", dense={"wikitext2": 20, "c4": 5}
    )
    named = {"alps", "uniform", "search", "values as they are", "values of 4 bits", "values of 3 bits"}
    assert named | {"dense model: 10", "llama: perplexity (geometric mean of c4, wikitext2)"} <= set(texts(drawn))


def test_infinite_perplexities_leave_a_gap(tmp_path):
    results = [run(perplexity=(math.inf, 30.0), bits_per_weight=3.0), run(bits_per_weight=5.0)]
    assert math.isnan(_lines(results)["wanda", "uniform", None][0][1])
    plot_perplexity_by_bits(results, tmp_path / "bits")


@pytest.mark.parametrize(
    "results, match",
    [
        ([], "no run without an error"),
        ([run()], "takes None bits a weight"),
        ([run(bits_per_weight=2.0), run(perplexity=(20.0,), bits_per_weight=2.0)], "the same datasets"),
    ],
)
def test_errors(results, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        plot_perplexity_by_bits(results, tmp_path / "bits")
