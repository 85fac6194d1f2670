import json
import re
from dataclasses import replace

import pytest

from optimum_neuronal.comparing.comparison import Comparison, check_tables_directory, merge
from optimum_neuronal.comparing.results import Result


def task(accuracy):
    return {"t": {"accuracy": accuracy, "stderr": 0.01, "metric": "acc", "samples": 9}}


def result(sparsity, saliency, topup, *perplexities, accuracy=None, **others):
    values, tasks = dict(zip(("a", "b"), perplexities)), task(accuracy) if accuracy else {}
    return Result(sparsity, saliency, topup, values, tasks, achieved_sparsity=sparsity, **others)


@pytest.fixture
def comparison():
    return Comparison(
        "a-model",
        result(0.0, "dense", "dense", 10.0, 20.0, accuracy=0.8, bits_per_weight=16.0),
        [
            result(0.5, "wanda", "uniform", 20.0, 40.0, accuracy=0.6, bits_per_weight=9.0),
            result(0.5, "magnitude", "uniform", 80.0, 160.0, accuracy=0.4),
            result(0.5, "wanda", "owl", 20.0, 80.0, accuracy=0.8, block_lambda=0.1, peak_memory={"host": 2 * 10**9}),
            Result(0.5, "magnitude", "owl", error="out of | luck"),
        ],
        {"num_samples": 8, "seq_length": 16, "source": "c4", "seed": 3},
        {"torch": "2"},
        config={"refit_epochs": 6, "seed": 3},
    )


def squeezed(table):
    """Each cell without the blanks that align it."""
    return re.sub(" +", " ", table)


def test_aggregates_by_hand(comparison):
    """Geometric means over saliencies and test sets (paper, section 5.3), of saliencies that every top-up ran with."""
    uniform, owl = comparison.aggregates()
    assert uniform.perplexity_factor == pytest.approx(2) and uniform.accuracy_retention == pytest.approx(0.75)
    assert owl.perplexity_factor == pytest.approx((2 * 4) ** 0.5) and owl.accuracy_retention == pytest.approx(1.0)
    assert uniform.saliencies == owl.saliencies == ["wanda"]
    comparison.results[3] = result(0.5, "magnitude", "owl", 40.0, 80.0, accuracy=0.2)
    uniform, owl = comparison.aggregates()
    assert uniform.perplexity_factor == pytest.approx((2 * 2 * 8 * 8) ** 0.25)
    assert uniform.accuracy_retention == pytest.approx((0.75 * 0.5) ** 0.5)
    assert owl.perplexity_factor == pytest.approx((2 * 4 * 4 * 4) ** 0.25) and owl.saliencies == ["wanda", "magnitude"]


def test_a_setting_that_failed_for_one_top_up_counts_for_none(comparison):
    settings = [{"setting": {"num_samples": number}} for number in (4, 8)]
    comparison.results = [
        *(result(0.5, "wanda", "uniform", 10.0 * number, **setting) for number, setting in zip((2, 8), settings)),
        result(0.5, "wanda", "owl", 10.0, **settings[0]),
        Result(0.5, "wanda", "owl", error="no memory", **settings[1]),
    ]
    uniform, owl = comparison.aggregates()
    assert (uniform.perplexity_factor, owl.perplexity_factor) == (pytest.approx(2), pytest.approx(1))
    assert uniform.saliencies == owl.saliencies == ["wanda"]


def test_what_differs_is_told_apart(comparison):
    """Sparsities that round to the same percent, and a swept field that an experiment gives too."""
    close = result(0.504, "wanda", "uniform", 20.0, 40.0, setting={"num_alignment_samples": 4})
    config = {"num_alignment_samples": 8, "refit_epochs": 6}
    text = squeezed(replace(comparison, results=[*comparison.results, close], config=config).to_markdown())
    assert "| PPLFac, 50% | PPLFac, 50.4% |" in text and "All with refit_epochs=6.\n" in text


def test_tables(comparison):
    comparison.windows = {"a": (4, 8, False), "b": (5, 8, True)}
    assert "Perplexity: a (4 x 8 tokens), b (5 x 8 tokens, BOS first)." in str(comparison)
    line = next(line for line in str(comparison).splitlines() if "owl" in line)
    expected = "50.00% wanda owl - 20.00 80.00 80.00% ± 1.00% 80.00% ± 1.00% - - 2.00 block 0.10"
    assert squeezed(line).strip() == expected and "failed: out of | luck" in str(comparison)
    markdown = squeezed(comparison.to_markdown())
    assert "| 0.00% | dense | - | 16.00 | 10.00 |" in markdown and "out of \\| luck" in markdown
    assert "Calibration: 8 x 16 tokens of c4, seed 3.\n\nAll with refit_epochs=6." in markdown
    assert "Versions: torch 2." in markdown


def test_latex(comparison):
    table = squeezed(comparison.to_latex())
    assert "% Calibration: 8 x 16 tokens of c4, seed 3.\n\n% All with" in table
    assert r"50.00\% & wanda & owl & - & \textbf{20.00} & 80.00 & \textbf{80.00\% $\pm$ 1.00\%}" in table
    assert table.count(r"\begin{tabular}") == table.count(r"\bottomrule") == 2 and r"PPLFac, 50\%" in table


def test_a_top_up_far_above_uniform_sparsity_is_named(comparison):
    comparison.results.append(result(0.5, "wanda", "dlp", 28.0, 56.0))
    assert not [note for note in comparison.notes() if note.startswith("Warning")], "1.4 times"
    comparison.results.append(result(0.5, "wanda", "alpha_pruning", 400.0, 800.0))
    far = "Warning: alpha_pruning at 50% has 20.0 times the perplexity of uniform sparsity, on average."
    assert comparison.notes()[-1] == far and far in str(comparison)


def test_the_error_of_a_mean_accuracy_is_that_of_independent_tasks():
    """Half of the square root of 0.03^2 + 0.04^2; a task of one question has none."""
    tasks = {name: {"accuracy": 0.5, "stderr": error} for name, error in (("a", 0.03), ("b", 0.04))}
    assert Result(0.5, "wanda", "owl", accuracy=tasks).mean_accuracy_error == pytest.approx(0.025)
    tasks["b"]["stderr"] = None
    assert Result(0.5, "wanda", "owl", accuracy=tasks).mean_accuracy_error is None
    assert Result(0.5, "wanda", "owl").mean_accuracy_error is None


def test_means_over_seeds(comparison):
    """With a deviation of 0, in place of a proportion's own error. No lambda is dropped because another seed chose it too."""
    lambdas = [(0.12, 0.2), (0.1, 0.25), (0.12, 0.2)]
    comparison.results[3:] = [
        result(0.7, "ria", "owl", 9.0, 9.0, accuracy=0.7, block_lambda=block, row_lambda=row, setting={"seed": seed})
        for seed, (block, row) in enumerate(lambdas)
    ]
    note = {"note": "no row step: x"}
    comparison.results.append(result(0.8, "ria", "owl", 9.0, 9.0, block_lambda=0.125, decisions=note))
    text = str(comparison)
    assert "9.00 ± 0.00 9.00 ± 0.00 70.00% ± 0.00% 70.00% ± 0.00%" in squeezed(text)
    assert "block 0.12, 0.10, 0.12; row 0.20, 0.25, 0.20" in text and "block 0.125; no row step: x" in text


def test_presets(comparison):
    preset = result(0.5, "preset", "best", 11.0, 22.0, accuracy=0.8, allocation_seconds=7.5, pruning_seconds=2.0)
    comparison.results.append(preset)
    text = squeezed(comparison.to_markdown())
    assert "| 50.00% | preset | best |" in text and "| 9.5 |" in text and "\n| preset best | **1.10** |" in text
    assert [entry.topup for entry in comparison.aggregates()] == ["uniform", "owl", "preset best"]
    assert preset.method == "preset best, 50% sparsity"


def test_the_best_of_every_amount_is_bold(comparison):
    """The dense model does not count. Two that look alike are both best."""
    comparison.results.insert(3, result(0.7, "wanda", "uniform", 90.0, 90.0, accuracy=0.1))
    comparison.results.append(result(0.5, "ria", "owl", 20.001, 90.0, accuracy=0.2))
    lines = [line for line in squeezed(comparison.to_markdown()).splitlines() if "%" in line]
    assert "| wanda | uniform | 9.00 | **20.00** | **40.00** | 60.00% ± 1.00% | 60.00% ± 1.00% |" in lines[1]
    assert "| wanda | owl | - | **20.00** | 80.00 | **80.00% ± 1.00%** | **80.00% ± 1.00%** |" in lines[3]
    assert "| ria | owl | - | **20.00** | 90.00 |" in lines[6]
    assert not any("**" in line for line in lines if "dense |" in line or "failed" in line or "70.00%" in line)


def test_tables_of_others_are_not_replaced(comparison, tmp_path):
    check_tables_directory(tmp_path / "new", False)
    assert not list(tmp_path.iterdir()), "checking creates nothing"
    for content in ("mine", "[]", '{"model": 1}'):
        (tmp_path / "comparison.json").write_text(content)
        with pytest.raises(FileExistsError, match="holds tables of something else than a comparison: .*--overwrite"):
            comparison.save(tmp_path)
        assert (tmp_path / "comparison.json").read_text() == content and len(list(tmp_path.iterdir())) == 1
    comparison.save(tmp_path, overwrite=True)
    comparison.save(tmp_path)
    values = json.loads((tmp_path / "comparison.json").read_text())
    assert (tmp_path / "comparison.tex").read_text() == comparison.to_latex()
    assert values["results"][2]["block_lambda"] == 0.1 and values["aggregates"][0]["saliencies"] == ["wanda"]
    check_tables_directory(tmp_path, False, "a-model")
    with pytest.raises(FileExistsError, match="holds tables of a-model: choose another"):
        check_tables_directory(tmp_path, False, "b-model")
    check_tables_directory(tmp_path, True, "b-model")
    assert len(list(tmp_path.iterdir())) == 3


def saved(folder, model, dense, **perplexities):
    """A comparison at 70 %, with a perplexity by saliency and top-up."""
    results = [Result(0.7, *name.split("_"), {"c4": value}, task(0.4)) for name, value in perplexities.items()]
    Comparison(model, Result(0.0, "dense", "dense", {"c4": dense}, task(0.8)), results, {}, {}).save(folder)
    return folder


def test_means_over_models_by_hand(tmp_path):
    """Wanda counts twice. RIA ran with one top-up only, and does not count."""
    one = saved(tmp_path / "one", "a", 10.0, wanda_uniform=20.0, wanda_owl=15.0, ria_owl=11.0)
    two = saved(tmp_path / "two", "b", 4.0, wanda_uniform=32.0, wanda_owl=6.0)
    lines = squeezed(merge([one, two], tmp_path / "means")).splitlines()
    assert "| uniform | 4.00 | **50.0%** | - |" in lines, "sqrt(20 / 10 * 32 / 4)"
    assert "| owl | **1.50** | **50.0%** | +53.1% |" in lines, "the mean of 1 - 15 / 20 and 1 - 6 / 32"
    assert (tmp_path / "means" / "means.md").read_text().startswith("# a, b\n")


def test_runs_that_measured_different_things_are_refused(tmp_path):
    one = saved(tmp_path / "one", "a", 10.0, wanda_uniform=20.0)
    for name, changes, message in (
        ("tests", {"perplexity": {"ptb": 4.0}}, r"of a and b have different .*\['c4'\], .* and \(\['ptb'\]"),
        ("tasks", {"accuracy": {}}, r"\['t'\], .* and .*\[\], .*: measure both on the same"),
    ):
        dense = replace(Result(0.0, "dense", "dense", {"c4": 4.0}, task(0.8)), **changes)
        Comparison("b", dense, [], {}, {}).save(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            merge([one, tmp_path / name], tmp_path / "means")
    assert not (tmp_path / "means").exists()


def test_what_no_comparison_wrote(tmp_path):
    (tmp_path / "comparison.json").write_text("[]")
    with pytest.raises(ValueError, match="comparison.json was not written by a comparison"):
        merge([tmp_path], tmp_path / "means")
    with pytest.raises(FileNotFoundError):
        merge([tmp_path / "gone"], tmp_path / "means")
    (tmp_path / "means.md").write_text("mine")
    one = saved(tmp_path / "one", "a", 10.0, wanda_uniform=20.0)
    with pytest.raises(FileExistsError, match="means.md exists: choose another directory"):
        merge([one], tmp_path)
    assert (tmp_path / "means.md").read_text() == "mine"
