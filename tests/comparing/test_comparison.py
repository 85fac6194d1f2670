import csv
import io
import json
import math
import re

import pytest

from optimum_neuronal.comparing.comparison import Comparison, check_output
from optimum_neuronal.comparing.results import Result, geometric_mean


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


def test_geometric_means():
    for values, mean in (([2, 8], 4), ([5], 5), ([0, 7], 0), ([math.inf, 2], math.inf), ([], None)):
        assert geometric_mean(values) == (mean if mean is None else pytest.approx(mean))


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
        "0.0",
        "0.0",
        "2.00",
        "0.1",
    ]
    assert "failed: out of | luck" in text
    markdown = comparison.to_markdown()
    assert "bits" not in markdown and "| 0.00% | dense | - | 10.00 |" in squeezed(markdown)
    assert text.splitlines()[2].split()[:4] == ["0.00%", "dense", "-", "10.00"]
    assert "Calibration: 8 x 16 tokens of c4." in markdown and "out of \\| luck" in markdown
    rows = [line for line in markdown.splitlines() if "wanda" in line or "failed" in line]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def squeezed(table):
    """Each cell without the blanks that align it."""
    return re.sub(" +", " ", table)


@pytest.fixture
def with_bits(comparison):
    """A row with zeros, and quantised ones."""
    comparison.dense.bits_per_weight = 16.0
    comparison.results = [
        result(0.5, "wanda", "uniform", 20.0, 40.0, bits_per_weight=9.0),
        result(0.0, "quantised", "rates", 30.0, 60.0, budget=3.2, bits_per_weight=3.125),
        Result(0.0, "quantised", "rates", error="no", budget=2.4),
    ]
    comparison.dense.accuracy = {}
    return comparison


def test_bits_have_columns_and_groups_of_their_own(with_bits):
    lines = squeezed(with_bits.to_markdown()).splitlines()
    assert lines[4].startswith("| sparsity | saliency | top-up | bits a weight | perplexity a |")
    assert lines[6].startswith("| 0.00% | dense | - | 16.00 | 10.00 |")
    assert lines[7].startswith("| 50.00% | wanda | uniform | 9.00 | 20.00 | 40.00 |"), "alone of its kind"
    assert lines[8].startswith("| 0.00% | quantised | rates | 3.12 | 30.00 | 60.00 |")
    assert lines[9].startswith("| 0.00% | quantised | rates | - | - |")
    without, quantised, failed = with_bits.aggregates()
    assert (without.budget, quantised.budget, quantised.saliencies, failed.saliencies) == (None, 3.2, 1, 0)
    assert without.perplexity_factor == pytest.approx(2)
    header = ["top-up", *(f"perplexity x dense, {asked}" for asked in ("50%", "3.2 bits", "2.4 bits"))]
    assert with_bits.aggregate_table().header == header
    assert repr(with_bits.results[1]).startswith("Result(quantised, 3.2 bits, perplexity a 30.00")
    assert repr(with_bits.results[2]) == "Result(quantised, 2.4 bits, failed: no)"
    rows = list(csv.DictReader(io.StringIO(with_bits.to_csv())))
    assert [row["budget"] for row in rows] == ["", "", "3.2", "2.4"] and rows[2]["bits_per_weight"] == "3.125"
    assert json.loads(json.dumps(with_bits.to_dict()))["results"][1]["budget"] == 3.2


def test_a_preset_is_named_as_one(comparison):
    comparison.results += [
        result(0.5, "preset", "fast", 11.0, 22.0, accuracy=0.8, rotation_seconds=7.5, pruning_seconds=2.0),
        result(0.5, "wanda", "default", 40.0, 80.0, accuracy=0.4),  # someone's own top-up
    ]
    text = squeezed(comparison.to_markdown())
    assert "| 7.5 | 0.0 | 2.0 |" in text and comparison.results[-2].seconds == 9.5
    assert "| 50.00% | preset | fast |" in text and "\n| preset fast | **1.10** |" in text
    assert [entry.topup for entry in comparison.aggregates()] == ["uniform", "owl", "preset fast", "default"]
    assert repr(comparison.results[-2]).startswith("Result(preset fast, 50.00%, perplexity a 11.00")
    row = list(csv.DictReader(io.StringIO(comparison.to_csv())))[-2]
    assert (row["saliency"], row["topup"], row["rotation_seconds"]) == ("preset", "fast", "7.5")
    del comparison.results[-2:]
    assert "rotation s" not in str(comparison)


def test_files(comparison, tmp_path):
    assert [path.name for path in comparison.save(tmp_path)] == ["comparison.json", "comparison.csv", "comparison.md"]
    values = json.loads((tmp_path / "comparison.json").read_text())
    assert values["results"][2]["block_lambda"] == 0.1 and values["aggregates"][0]["saliencies"] == 2
    rows = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    assert [row["saliency"] for row in rows] == ["dense", "wanda", "magnitude", "wanda", "magnitude"]
    assert rows[1]["perplexity b"] == "40.0" and rows[4]["error"] == "out of | luck" and rows[4]["perplexity a"] == ""
    assert float(rows[3]["accuracy t"]) == 0.8 and rows[3]["peak_memory"] == "2000000000"
    assert len(list(tmp_path.iterdir())) == 3


def test_files_of_others_are_not_replaced(plotted, tmp_path):
    """Neither a table nor a figure, unless asked; checking creates nothing."""
    check_output(tmp_path / "new", False)
    assert not list(tmp_path.iterdir())
    for name, write in (
        ("comparison.md", plotted.save),
        ("comparison.json", plotted.save),
        ("lambda-mine.svg", plotted.plot),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for content in ("mine", "[]", '{"model": 1}'):
            (folder / name).write_text(content)
            with pytest.raises(FileExistsError, match=f"{name} was not written by a comparison.*--overwrite"):
                write(folder)
            assert [path.name for path in folder.iterdir()] == [name] and (folder / name).read_text() == content
        write(folder, overwrite=True)
        assert len(list(folder.iterdir())) > 1


def test_the_best_of_every_sparsity_is_bold(comparison):
    """Of what is measured, the dense model aside; two that look alike are both best."""
    comparison.results.insert(3, result(0.7, "wanda", "uniform", 90.0, 90.0, accuracy=0.1))
    comparison.results.append(result(0.5, "ria", "owl", 20.001, 90.0, accuracy=0.2))
    lines = [line for line in squeezed(comparison.to_markdown()).splitlines() if "%" in line]
    assert "| 50.00% | wanda | uniform | **20.00** | **40.00** | 60.00% ± 1.00% | 60.00% |" in lines[1]
    assert "| wanda | owl | **20.00** | 80.00 | **80.00% ± 1.00%** | **80.00%** |" in lines[3]
    assert "| ria | owl | **20.00** | 90.00 |" in lines[6]
    assert not any("**" in line for line in lines if "dense" in line or "failed" in line or "70.00%" in line)
    aggregates = squeezed(comparison.to_markdown()).split("geometric mean")[1]
    assert "| owl | **" in aggregates and aggregates.count("**") == 4, "at 70 % there is nothing to choose from"
    assert comparison._repr_html_().count("<b>") == 1 + len(comparison.table().bold) + 2


def test_short_and_in_notebooks(comparison):
    assert repr(comparison) == "Comparison(a-model, 4 combinations, 1 failed)"
    assert repr(comparison.dense) == "Result(dense, perplexity a 10.00, perplexity b 20.00, mean accuracy 80.00%)"
    assert repr(comparison.results[-1]) == "Result(magnitude + owl, 50.00%, failed: out of | luck)"
    page = comparison._repr_html_()
    assert page.count("<table>") == 2 and '<td style="text-align: right;"> 80.00</td>' in squeezed(page)
    comparison.model = "<script>"
    assert "<script>" not in comparison._repr_html_()


def drawable(topup):
    return result(0.5, "wanda", topup, 20.0, 40.0, accuracy=0.5, block_sparsity=[0.4, 0.5, 0.6], pruning_seconds=1.0)


@pytest.fixture
def plotted(comparison):
    comparison.results = [drawable("uniform"), drawable("owl")]
    return comparison


def test_figures_are_embedded_in_the_page_beside_them(plotted, tmp_path):
    """A folder with a comparison is continued."""
    for _ in range(2):
        plotted.save(tmp_path)
        figures = plotted.plot(tmp_path)
    assert list(figures.images) == ["perplexity-by-seconds", "block-sparsity-wanda-50"] and len(figures.paths) == 4
    page = (tmp_path / "comparison.md").read_text()
    assert page.startswith(plotted.to_markdown()) and page.endswith("](block-sparsity-wanda-50.png)\n")
    assert all((tmp_path / name).is_file() for name in re.findall(r"!\[.*\]\((.*)\)", page))
    plotted.plot(tmp_path)
    assert (tmp_path / "comparison.md").read_text() == page, "once each"


def test_figures_leave_other_pages_alone_and_need_no_directory(plotted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figures = plotted.plot()
    assert repr(figures) == "Figures(perplexity-by-seconds, block-sparsity-wanda-50)"
    assert figures._repr_html_().count('src="data:image/png;base64,iVBOR') == 2
    assert figures.paths == [] and not list(tmp_path.iterdir())
    (tmp_path / "comparison.md").write_text("# My notes\n")
    assert len(plotted.plot(tmp_path).paths) == 4
    assert (tmp_path / "comparison.md").read_text() == "# My notes\n"
