import math

import pytest
from example_figures import DRAWN, texts

from optimum_neuronal.comparing.figures.block_sparsity import plot_block_sparsity


def test_labels(tmp_path):
    written = texts(DRAWN["blocks"](tmp_path / "figure"))
    assert {"uniform", "neuronal", "Decoder block", "Sparsity", "70 %"} < set(written)


def test_more_methods_than_colours(tmp_path):
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
def test_errors(by_method, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        plot_block_sparsity(by_method, tmp_path / "figure")
