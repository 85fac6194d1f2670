"""benchmarks/ladder_losses.py measures what is missing, once, and shows what was measured."""

import importlib
from pathlib import Path

import pytest

from optimum_neuronal.topup.quantising import Rates


TASKS = {"variants": ["Wanda, uniform"], "sparsities": [0.5, 0.6], "bits": ["4.5+uniform"]}


@pytest.fixture(scope="module")
def losses():
    """The module benchmarks.ladder_losses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent)
        yield importlib.import_module("benchmarks.ladder_losses")


def test_an_interrupted_measurement_goes_on(losses, llama, ids, tmp_path, monkeypatch):
    output = tmp_path / "losses.jsonl"
    monkeypatch.setattr(losses, "load", lambda _folder: (llama, ids[:4], {"code": ids[:2], "english": ids[2:4]}))
    losses.measure(Path("rungs/3"), ["Wanda, uniform"], [0.5], [], output)
    first = output.read_text()
    losses.measure(Path("rungs/3"), **TASKS, output=output)
    assert output.read_text().startswith(first), "nothing was measured again"
    found = losses.lines(output)
    assert [(line["variant"], line.get("sparsity")) for line in found] == [
        ("dense", None), ("Wanda, uniform", 0.5), ("Wanda, uniform", 0.6), ("4.5+uniform", None),
    ]  # fmt: skip
    assert all(line["rung"] == 3 and line["excess"].keys() == {"code", "english"} for line in found[1:])
    assert found[0]["perplexity"].keys() == {"code", "english"}
    assert 2 < found[-1]["bits"] <= 4.5


def test_all_budgets_use_the_same_trials(losses, monkeypatch):
    calls = []
    monkeypatch.setattr(Rates, "_divergences", lambda _self, sweep: calls.append(sweep) or {"q_proj": 0.5})
    before = Rates._divergences
    with losses.divergences_measured_once():
        assert [Rates(budget)._divergences("sweep") for budget in (2.4, 3.0)] == [{"q_proj": 0.5}] * 2
    assert calls == ["sweep"] and Rates._divergences is before


def test_every_row_makes_a_config_and_is_shown(losses, tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "FOLDER", tmp_path)
    excess = {"code": 0.1, "english": 0.3}
    found = [
        {"rung": rung, "variant": variant, "sparsity": 0.7, "excess": excess}
        for rung in (1, 10)
        for variant in losses.VARIANTS
    ]
    found.append({"rung": 10, "variant": "2.4", "bits": 2.39, "excess": excess})
    found.append({"rung": 10, "variant": "dense", "perplexity": {"code": 12.5}})
    text = "\n".join(losses.tables(found))
    assert (
        "| ALPS, search, rotated " in text
        and "0.200" in text
        and "this package, 2.39 bits" in text
        and "12.50" in text
    )
    losses.draw(found)
    assert "tokens per parameter" in (tmp_path / "ladder.svg").read_text(encoding="utf-8")


def test_what_is_kept_in_the_repository_can_be_shown(losses):
    found = losses.lines(losses.RESULTS)
    known = {losses.DENSE, *losses.VARIANTS, *losses.BITS}
    assert {line["variant"] for line in found} <= known
    assert len({(line["rung"], line["variant"], line.get("sparsity")) for line in found}) == len(found)
