import pytest
from example_figures import DRAWN, texts

from optimum_neuronal.comparing.figures.lambda_curve import plot_lambda_curve


def test_labels(tmp_path):
    written = texts(DRAWN["lambda"](tmp_path / "figure"))
    assert {"Alignment error", "candidate", "chosen: 0.1", "abandoned"} < set(written)
    written = texts(plot_lambda_curve([(0.1, 1.5)], 0.1, tmp_path / "figure", "Perplexity"))
    assert "abandoned" not in written


@pytest.mark.parametrize("chosen", [0.2, 0.3])
def test_chosen_has_no_value(chosen, tmp_path):
    with pytest.raises(ValueError, match="none of the candidates with a value: 0.05, 0.1"):
        plot_lambda_curve([(0.1, 1.5), (0.05, 2.0), (0.2, None)], chosen, tmp_path / "figure", "x")
