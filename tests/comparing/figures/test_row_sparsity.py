import numpy as np
import pytest
from example_figures import DRAWN, texts

from optimum_neuronal.comparing.figures.row_sparsity import BINS, _binned, _row_names, _shortened, plot_row_sparsity


def test_labels(tmp_path):
    written = texts(DRAWN["rows"](tmp_path / "figure"))
    assert {"0.self_attn.q_proj", "3.mlp.down_proj", "Row sparsity", "50 %", "51 %"} < set(written)


def test_all_rows_alike(tmp_path):
    written = texts(plot_row_sparsity({"lm.layers.7.mlp.up_proj": [0.7] * 3}, tmp_path / "figure"))
    assert {"7.mlp.up_proj", "69.6 %", "70 %", "70.4 %"} < set(written)


def test_a_shared_scale(tmp_path):
    written = texts(plot_row_sparsity({"h.0.up": [0.7, 0.72]}, tmp_path / "figure", title="llama", scale=(0.4, 0.9)))
    assert {"llama", "40 %", "50 %", "60 %", "70 %", "80 %", "90 %"} < set(written)


def test_bins():
    shares = np.arange(2 * BINS) / (2 * BINS)
    assert _binned(shares) == pytest.approx(shares.reshape(BINS, 2).mean(1))
    few = _binned(np.array([0.1, 0.2]))
    assert few == pytest.approx([0.1] * (BINS // 2) + [0.2] * (BINS // 2))
    assert _binned(np.linspace(0, 1, 1000)).mean() == pytest.approx(0.5)
    assert _binned(np.array([0.1, 0.2, 0.3])).shape == (BINS,)


def test_many_are_named_by_block():
    names = [f"h.{block}.{part}" for block in range(40) for part in ("attn.c_attn", "attn.c_proj")]
    places, texts = _row_names(names)
    assert places == list(range(0, 81, 2)) and texts[:2] == ["block 0", "block 1"] and len(texts) == 40


def test_many_blocks_are_named_together():
    places, texts = _row_names([f"h.{block}.c_proj" for block in range(101)])
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
def test_short_names(names, short):
    assert _shortened(names) == short


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_row_sparsity({}, tmp_path / "figure")
    with pytest.raises(ValueError, match="'x' has sparsities outside"):
        plot_row_sparsity({"x": [2.0]}, tmp_path / "figure")
