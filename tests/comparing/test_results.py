"""The paper's aggregates, from the paper's own figures (tests/fixtures/README.md)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from optimum_neuronal.comparing.results import Result, aggregate
from optimum_neuronal.comparing.tables import aggregate_caption


TABLES = json.loads((Path(__file__).parents[1] / "fixtures" / "paper_tables.json").read_text())
MODELS = range(5)
TESTS = ("wikitext2", "c4", "ptb")
SPARSITIES = ("0.6", "0.7", "0.8")


def result(model, sparsity, saliency, topup, perplexities, accuracies=None):
    """One model's part of a row of Tables 3, 17 or 18, and of Tables 4 or 5."""
    accuracy = {} if accuracies is None else {"mean": {"accuracy": accuracies[model]}}
    return Result(float(sparsity), saliency, topup, dict(zip(TESTS, perplexities[3 * model :])), accuracy)


def models():
    """The paper's five models, each with its dense result and all others. Tables 4 and 5 have no row of magnitude."""
    for model in MODELS:
        results = [
            result(model, sparsity, saliency, topup, row, TABLES["accuracy"][sparsity].get(saliency, {}).get(topup))
            for sparsity in SPARSITIES
            for saliency, rows in TABLES["perplexity"][sparsity].items()
            for topup, row in rows.items()
        ]
        dense = result(model, "0", "dense", "dense", TABLES["dense_perplexity"], TABLES["dense_accuracy"])
        yield dense, results


def test_table_6():
    """All 30 values: PPLFac over three saliencies, AccRet over two of them."""
    found = aggregate(models(), ["multiflow", "wanda"])
    assert len(found) == 15
    for one in found:
        column = SPARSITIES.index(str(one.sparsity))
        factor, retention = (
            TABLES["table_6"][name][one.topup][column] for name in ("perplexity_factor", "accuracy_retention")
        )
        assert round(one.perplexity_factor, 1) == factor and round(100 * one.accuracy_retention, 1) == retention
    caption = aggregate_caption(found)
    assert "mean over magnitude; multiflow; wanda. AccRet" in caption and "mean over multiflow; wanda. Imp" in caption


def test_accuracy_is_over_the_saliencies_that_are_named():
    """Of saliencies without a result, or without any that is named, AccRet is over those of PPLFac."""
    dense = Result(0.0, "dense", "dense", {"c4": 1.0}, {"t": {"accuracy": 1.0}})
    one, two = (
        Result(0.6, saliency, "owl", {"c4": 2.0}, {"t": {"accuracy": accuracy}})
        for saliency, accuracy in (("magnitude", 0.25), ("sparsegpt, authors", 0.5))
    )
    for named, expected, saliencies in (
        (None, 0.125**0.5, ["magnitude", "sparsegpt, authors"]),
        (["sparsegpt", "wanda"], 0.5, ["sparsegpt, authors"]),
        (["wanda"], 0.125**0.5, ["magnitude", "sparsegpt, authors"]),
    ):
        (found,) = aggregate([(dense, [one, two])], named)
        assert found.accuracy_retention == pytest.approx(expected) and found.accuracy_saliencies == saliencies
        assert found.perplexity_factor == pytest.approx(2) and len(found.saliencies) == 2
    useless = replace(dense, accuracy={"t": {"accuracy": 0.0}})
    assert aggregate([(useless, [one, two])])[0].accuracy_retention is None


@pytest.mark.parametrize("sparsity, expected", [(0.7, 66.8), (0.8, 81.5)])
def test_table_2(sparsity, expected):
    """OWL over Wanda on LLaMA-1 7B; the same sparsity of another seed, saliency or model is no reference."""
    dense, results = list(models())[1]
    results = [one for one in results if one.saliency == "wanda" and one.sparsity == sparsity]
    others = [replace(one, setting={"seed": 1}, perplexity=dict.fromkeys(TESTS, 1.0)) for one in results[:1]]
    found = {one.topup: one for one in aggregate([(dense, results), (replace(dense), others)])}
    assert round(100 * found["owl"].improvement, 1) == expected and found["uniform"].improvement is None
    dense, owl = Result(0.0, "dense", "dense", {"c4": 1.0}), Result(0.6, "wanda", "owl", {"c4": 2.0})
    (alone,) = aggregate([(dense, [Result(0.6, "wanda", "uniform", error="no memory"), owl])])
    assert alone.perplexity_factor == pytest.approx(2) and alone.improvement is None, "what failed is no reference"
