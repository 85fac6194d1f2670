from dataclasses import replace

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
    assert "| uniform | 4.00 | **50.0%** | - |" in lines, "sqrt(20 / 10 * 32 / 4)"
    assert "| owl | **1.50** | **50.0%** | +53.1% |" in lines, "the mean of 1 - 15 / 20 and 1 - 6 / 32"
    assert (
        "| amount | saliency | top-up | a perplexity c4 | a mean accuracy | b perplexity c4 | b mean accuracy |"
        in lines
    )
    assert "| 70% sparsity | wanda | uniform | 20.00 | **40.00%** | 32.00 | **40.00%** |" in lines
    assert (tmp_path / "means" / "means.md").read_text().startswith("# a, b\n")


def test_runs_that_measured_different_things_are_refused(tmp_path):
    one = saved(tmp_path / "one", "a", 10.0, wanda_uniform=20.0)
    for name, changes, message in (
        ("tests", {"perplexity": {"ptb": 4.0}}, r"of a and b have different test sets, \['c4'\] and \['ptb'\]"),
        ("tasks", {"accuracy": {}}, r"different tasks, \['t'\] and \[\]: measure both on the same"),
    ):
        dense = replace(Result(0.0, "dense", "dense", {"c4": 4.0}, {"t": task(0.8)}), **changes)
        Comparison("b", dense, [], {}, {}).save(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            merge([one, tmp_path / name], tmp_path / "means")
    assert not (tmp_path / "means").exists()


def test_amounts_over_fewer_models_say_so(tmp_path):
    """One model was not pruned at 60 %."""
    one = saved(tmp_path / "one", "a", 10.0, wanda_uniform=20.0)
    dense = Result(0.0, "dense", "dense", {"c4": 4.0}, {"t": task(0.8)})
    results = [Result(sparsity, "wanda", "uniform", {"c4": 8.0}, {"t": task(0.4)}) for sparsity in (0.6, 0.7)]
    Comparison("b", dense, results, {}, {}).save(tmp_path / "two")
    assert "over wanda (70%); wanda (1 of 2 models) (60%);" in merge([one, tmp_path / "two"], tmp_path / "means")


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
