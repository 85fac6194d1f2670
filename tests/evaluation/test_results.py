import csv
import io
import json

import pytest

from optimum_neuronal.evaluation.results import Comparison, Result


def result(sparsity, saliency, topup, *perplexities, accuracy=None, **others):
    values = dict(zip(("a", "b"), perplexities))
    tasks = {"t": {"accuracy": accuracy, "stderr": 0.01, "metric": "acc", "samples": 9}} if accuracy else {}
    return Result(sparsity, saliency, topup, values, tasks, achieved_sparsity=sparsity, **others)


@pytest.fixture
def comparison():
    return Comparison(
        "a-model",
        result(0.0, "dense", "dense", 10.0, 20.0, accuracy=0.8),
        [
            result(0.5, "wanda", "uniform", 20.0, 40.0, accuracy=0.6),
            result(0.5, "magnitude", "uniform", 80.0, 160.0, accuracy=0.4),
            result(0.5, "wanda", "owl", 20.0, 80.0, accuracy=0.8, block_lambda=0.1, peak_memory={"host": 2 * 10**9}),
            Result(0.5, "magnitude", "owl", error="out of | luck"),
        ],
        {"num_samples": 8, "seq_length": 16, "source": "c4"},
        {"torch": "2"},
    )


def test_aggregates_by_hand(comparison):
    """Geometric means over saliencies and test sets (paper, section 5.3)."""
    uniform, owl = comparison.aggregates()
    assert uniform.perplexity_factor == pytest.approx((2 * 2 * 8 * 8) ** 0.25)
    assert uniform.accuracy_retention == pytest.approx((0.75 * 0.5) ** 0.5) and uniform.saliencies == 2
    assert owl.perplexity_factor == pytest.approx((2 * 4) ** 0.5)
    assert owl.accuracy_retention == pytest.approx(1.0) and owl.saliencies == 1


def test_a_topup_that_failed_everywhere_has_no_aggregate(comparison):
    comparison.results = comparison.failed
    (aggregate,) = comparison.aggregates()
    assert aggregate.perplexity_factor is None and aggregate.accuracy_retention is None
    assert str(comparison).splitlines()[-1].split() == ["owl", "-", "-"]


def test_a_comparison_under_way_has_tables(comparison):
    comparison.results.append(result(0.7, "wanda", "uniform", 30.0, 60.0, accuracy=0.5))
    assert str(comparison).splitlines()[-1].split()[:3] == ["owl", "2.83", "-"]


def test_tables(comparison):
    text = str(comparison)
    line = next(line for line in text.splitlines() if "owl" in line)
    assert line.split() == [
        "50.00%",
        "wanda",
        "owl",
        "20.00",
        "80.00",
        "80.00%",
        "±",
        "1.00%",
        "80.00%",
        *["0.0", "0.0", "2.00", "0.1"],
    ]
    assert "failed: out of | luck" in text
    markdown = comparison.to_markdown()
    assert "Calibration: 8 x 16 tokens of c4." in markdown and "out of \\| luck" in markdown
    assert (
        len(
            {
                line.replace("\\|", "").count("|")
                for line in markdown.splitlines()
                if "wanda" in line or "failed" in line
            }
        )
        == 1
    )


def test_files(comparison, tmp_path):
    assert [path.name for path in comparison.save(tmp_path)] == ["comparison.json", "comparison.csv", "comparison.md"]
    values = json.loads((tmp_path / "comparison.json").read_text())
    assert values["results"][2]["block_lambda"] == 0.1 and values["aggregates"][0]["saliencies"] == 2
    rows = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    assert [row["saliency"] for row in rows] == ["dense", "wanda", "magnitude", "wanda", "magnitude"]
    assert rows[1]["perplexity b"] == "40.0" and rows[4]["error"] == "out of | luck" and rows[4]["perplexity a"] == ""
    assert float(rows[3]["accuracy t"]) == 0.8 and rows[3]["peak_memory"] == "2000000000"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comparison.csv", "comparison.json", "comparison.md"]
