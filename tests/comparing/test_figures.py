import math

import pytest
from example_figures import DRAWN, METHODS, by_block, by_seconds, results
from example_figures import drawn as draw
from example_figures import result as run

from optimum_neuronal.comparing import figures
from optimum_neuronal.comparing.results import Result


def test_one_panel_per_sparsity_one_name_per_method():
    written = by_seconds(results((0.8, 0.625)))
    assert [text for text in written if text.endswith("sparsity")] == ["62.5% sparsity", "80% sparsity"]
    saliencies, topups = zip(*METHODS)
    for name in {f"saliency {saliency}" for saliency in saliencies} | set(topups):
        assert written.count(name) == 1
    assert not [text for text in by_seconds([run(), run()]) if "saliency" in text], "one needs no gray marker"
    assert "llama: geometric mean of perplexities on c4, wikitext2" in written and "dense model: 10" in written


def test_infinite_perplexities_are_named():
    found = [run(), run("magnitude", perplexity=(math.inf, 50.0))]
    assert "70% sparsity\ninfinite: magnitude + uniform, 70% sparsity" in by_seconds(found)


def test_blocks():
    assert {"uniform", "neuronal", "Decoder block", "Sparsity", "70.0%"} < set(DRAWN["blocks"]())
    names = [f"a rather long name of a method, number {index}" for index in range(20)]
    assert set(names) < set(by_block({name: [0.5, 0.6] for name in names}))


def result(topup, saliency="wanda", **more):
    return Result(0.7, saliency, topup, {"c4": 30.0}, block_sparsity=[0.6, 0.8], pruning_seconds=1.0, **more)


def drawn(found):
    return draw(found, "model", Result(0, "dense", "dense", {"c4": 20.0}))


FAILED = Result(0.7, "ria", "uniform", error="no memory")


def test_a_comparison_gets_the_figures_that_it_allows():
    both = ["perplexity-by-seconds", "block-sparsity-wanda-70"]
    assert list(drawn([result("uniform"), FAILED])) == both and drawn([FAILED]) == {}
    found = drawn([result("uniform", f"ria:{'power=1.0,' * 100}")])
    assert max(map(len, found)) < 150, "a method of many words has a file"


def test_without_test_text_there_are_blocks_only():
    found = draw([run(perplexity=())], "model", Result(0, "dense", "dense", {}))
    assert list(found) == ["block-sparsity-wanda-70"]


def test_titles_name_the_model_the_saliency_and_the_target():
    found = drawn([result("owl", saliency) for saliency in ("wanda", "ria")])
    assert len(found) == 3
    assert "model, ria, 70% sparsity" in found["block-sparsity-ria-70"]
    assert "model: perplexity on c4" in found["perplexity-by-seconds"]


def block_step(lam, *candidates, value=30.0, more=""):
    decisions = {"block": {"lambda": lam, "candidates": [{"lambda": own} for own in candidates or (lam,)]}}
    found = result(f"neuronal:steps=block{more}", block_lambda=lam, decisions=decisions)
    found.perplexity = {"c4": value, "ptb": 2 * value}
    return found


def test_lambdas_with_the_chosen_ones():
    """A line per test set; a circle where a lambda was chosen from several."""
    found = [block_step(lam, value=30 + lam) for lam in (0.05, 0.1, 0.2)]
    found.append(block_step(0.1, 0.05, 0.1, value=30.1))
    found.append(block_step(0.2, 0.05, 0.2, value=30.2, more=",metric=reconstruction"))
    files = drawn(found)["perplexity-by-neuronal-block-lambda-wanda-70"]
    named = {"block lambda of neuronal", "c4", "ptb", "chosen by the alignment", "chosen by the reconstruction error"}
    assert named < set(files)
    assert not [name for name in drawn(found[:2]) if "lambda" in name], "two lambdas make no figure"


def test_grids_and_sweeps():
    """A line per value of the second hyper-parameter; or per test set, if there is none."""
    grid = [result(f"owl:outlier_factor={m},half_width={width}") for m in (3, 5) for width in (0.04, 0.08, 0.2)]
    written = drawn(grid)["perplexity-by-owl-half_width-wanda-70"]
    assert {"half_width of owl", "outlier_factor=3", "outlier_factor=5"} < set(written)
    sweep = [result("neuronal", setting={"num_alignment_samples": count, "seed": 3}) for count in (1, 2, 4)]
    written = drawn(sweep)["perplexity-by-neuronal-num_alignment_samples-wanda-70"]
    assert {"num_alignment_samples of neuronal", "c4"} < set(written)


def test_sparsities():
    found = [result("owl") for _ in range(3)]
    for own, sparsity in zip(found, (0.1, 0.2, 0.3)):
        own.sparsity = sparsity
    assert {"wanda + owl", "20.0%", "Sparsity of the pruned projections"} < set(drawn(found)["perplexity-by-sparsity"])
    assert "perplexity-by-sparsity" not in drawn(found[:2])


def test_seeds_are_averaged(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(figures, "plot_lines", lambda path, title, own, *args, **options: (lines.append(own), path)[1])
    found = [run(setting={"seed": seed}, sparsity=s) for seed in (0, 1) for s in (0.5, 0.6, 0.7)]
    for number, own in enumerate(found):
        own.perplexity, own.block_sparsity = {"c4": 10.0 + number}, [None, 0.1 * number]
    figures.draw_figures(tmp_path, "model", Result(0, "dense", "dense", {"c4": 5.0}), found)
    by_sparsity, first = lines[:2]
    assert by_sparsity == {"wanda + uniform": [(0.5, 11.5), (0.6, 12.5), (0.7, 13.5)]}
    assert first["uniform"] == [(1, pytest.approx(0.15))]
