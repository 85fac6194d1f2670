import pytest

from optimum_neuronal.comparing.comparison import Comparison
from optimum_neuronal.comparing.means import merge
from optimum_neuronal.comparing.results import Result


def saved(folder, model, dense, **perplexities):
    """A comparison at 70 %, with a perplexity by saliency and top-up."""
    results = [Result(0.7, *name.split("_"), {"c4": value}, {"t": task(0.4)}) for name, value in perplexities.items()]
    Comparison(model, Result(0.0, "dense", "dense", {"c4": dense}, {"t": task(0.8)}), results, {}, {}).save(folder)
    return folder


def task(accuracy):
    return {"accuracy": accuracy, "stderr": None, "metric": "acc", "samples": 10}


def test_means_over_models_by_hand(tmp_path):
    """Wanda counts twice. RIA ran with one top-up only, and does not count."""
    one = saved(tmp_path / "one", "a", 10.0, wanda_uniform=20.0, wanda_owl=15.0, ria_owl=11.0)
    two = saved(tmp_path / "two", "b", 4.0, wanda_uniform=32.0, wanda_owl=6.0)
    lines = [" ".join(line.split()) for line in merge([one, two], tmp_path / "means").splitlines()]
    assert "| uniform | 4.00 | **50.0%** |" in lines, "sqrt(20 / 10 * 32 / 4)"
    assert "| owl | **1.50** | **50.0%** |" in lines
    assert (
        "| amount | saliency | top-up | a perplexity c4 | a mean accuracy | b perplexity c4 | b mean accuracy |"
        in lines
    )
    assert "| 70% sparsity | wanda | uniform | 20.00 | **40.00%** | 32.00 | **40.00%** |" in lines
    assert (tmp_path / "means" / "means.md").read_text().startswith("# a, b\n")


def test_what_no_comparison_wrote(tmp_path):
    (tmp_path / "comparison.json").write_text("[]")
    with pytest.raises(ValueError, match="comparison.json was not written by a comparison"):
        merge([tmp_path], tmp_path / "means")
    with pytest.raises(FileNotFoundError):
        merge([tmp_path / "gone"], tmp_path / "means")
    (tmp_path / "means.md").write_text("mine")
    one = saved(tmp_path / "one", "a", 10.0, wanda_uniform=20.0)
    with pytest.raises(FileExistsError, match="means.md was not written by a comparison"):
        merge([one], tmp_path)
    assert (tmp_path / "means.md").read_text() == "mine"
    assert merge([one], tmp_path / "means") == merge([one], tmp_path / "means")
