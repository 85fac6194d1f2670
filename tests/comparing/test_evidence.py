import math

from optimum_neuronal.comparing import settings
from optimum_neuronal.comparing.comparison import Comparison
from optimum_neuronal.comparing.evidence import PRESETS, evidence_page
from optimum_neuronal.comparing.results import DENSE, Result


def test_a_row_for_each_combination_with_its_excess():
    dense = Result(0.0, DENSE, DENSE, {"wikitext2": 10.0}, bits_per_weight=16.0)
    rows = [
        Result(0.7, "alps", "search", {"wikitext2": 10 * math.exp(0.25)}, pruning_seconds=3.0, bits_per_weight=5.8),
        Result(0.0, "quantised", "rates", {"wikitext2": 10 * math.exp(0.05)}, budget=2.4, bits_per_weight=2.4),
        Result(0.7, "wanda", "owl", error="no memory"),
    ]
    calibration = {"num_samples": 128, "seq_length": 2048, "source": "c4", "seed": 0}
    lines = evidence_page(Comparison("me/llama", dense, rows, calibration, {"torch": "2.13"})).splitlines()
    assert lines[0] == "# me/llama"
    assert "- Calibration: 128 x 2048 tokens of c4, seed 0." in lines
    assert "- Versions: torch 2.13." in lines and "- Failed: wanda + owl, 70.00%: no memory" in lines
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| me/llama")]
    assert [row[1:6] for row in cells] == [
        ["dense", "-", "16.00", "10.00", "0.000"],
        ["70 % sparsity", "alps, search", "5.80", "12.84", "0.250"],
        ["2.4 bits", "quantised", "2.40", "10.51", "0.050"],
        ["70 % sparsity", "wanda, owl", "-", "-", "-"],
    ]


def test_the_page_says_what_a_preset_chose():
    chosen = {"saliency": "alps", "topup": "search", "refit_epochs": 0, "rotate": True}
    rows = [
        Result(0.7, "preset", "fast", config={**chosen, "topup": "uniform", "rotate": False}),
        Result(0.7, "preset", "default", config=chosen),
        Result(0.7, "preset", "best", config={**chosen, "refit_epochs": 6}),
        Result(0.7, "preset", "default", error="no memory"),
    ]
    page = evidence_page(Comparison("me/llama", Result(0.0, DENSE, DENSE), rows, {}, {}))
    cells = [line.split("|")[2:4] for line in page.splitlines() if line.startswith("| me/llama")]
    assert [[cell.strip() for cell in row] for row in cells[1:]] == [
        ["70 % sparsity", "preset fast: alps, uniform"],
        ["70 % sparsity", "preset default: alps, search, rotated"],
        ["70 % sparsity", "preset best: alps, search, refit, rotated"],
        ["70 % sparsity", "preset default"],
    ]
    assert "- Failed: preset default, 70.00%: no memory" in page


def test_every_combination_of_the_preset_is_possible(monkeypatch):
    """Names of methods and fields of the config change; a preset that no longer fits would fail on a user's GPU."""
    monkeypatch.setattr(settings, "check_data", lambda *_: None)  # which asks the Hub
    own = {name: value for name, value in PRESETS["evidence"].items() if name not in ("num_samples", "seq_length")}
    found = settings.ComparisonSettings(**own, config={"num_samples": 128, "seq_length": 2048})
    assert len(found.possible) == len(found.combinations) == 3 * 3 * 3 + 3 + 2
    assert found.calibrated.num_samples == 128 and found.calibrated.seq_length == 2048
