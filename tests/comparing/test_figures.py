import math

import pytest
from example_figures import DENSE, DRAWN, METHODS, by_bits, by_block, by_seconds, results, results_with_bits, texts
from example_figures import result as run

from optimum_neuronal.comparing import figures
from optimum_neuronal.comparing.figures import _row_names, draw_figures
from optimum_neuronal.comparing.results import Result


def test_one_panel_per_sparsity_one_name_per_method():
    written = texts(by_seconds(results((0.8, 0.625))))
    assert [text for text in written if text.endswith("sparsity")] == ["62.5 % sparsity", "80 % sparsity"]
    for name in {name for method in METHODS for name in method}:
        assert written.count(name) == 1
    assert "llama: perplexity (geometric mean of c4, wikitext2)" in written and "dense model: 10" in written
    assert "Runtime in seconds: rotation, allocation and pruning" in written


def test_infinite_perplexities_are_named():
    found = [run(), run("magnitude", perplexity=(math.inf, 50.0))]
    assert "70 % sparsity (infinite: magnitude + uniform)" in texts(by_seconds(found))
    by_bits([run(perplexity=(math.inf, 30.0), bits_per_weight=3.0), run(bits_per_weight=5.0)])
    assert "model: perplexity on wikitext2" in texts(by_seconds([run(perplexity=(20.0,))], "model"))


def test_bits():
    named = {"alps", "quantised", "uniform", "search", "rates"}
    assert named | {"dense model: 10", "Bits a weight of the pruned projections"} <= set(texts(DRAWN["bits"]()))
    assert {"2.4 bits", "3 bits", "50 % sparsity"} <= set(texts(by_seconds(results_with_bits(("owl",)))))


def test_blocks():
    assert {"uniform", "neuronal", "Decoder block", "Sparsity", "70 %"} < set(texts(DRAWN["blocks"]()))
    names = [f"a rather long name of a method, number {index}" for index in range(20)]
    assert set(names) < set(texts(by_block({name: [0.5, 0.6] for name in names})))


def test_rows_and_lambdas():
    assert {"0.self_attn.q_proj", "3.mlp.down_proj", "Row sparsity", "50 %", "51 %"} < set(texts(DRAWN["rows"]()))
    assert {"candidate", "chosen: 0.1", "0.05", "Perplexity (lower is better)"} < set(texts(DRAWN["lambda"]()))


def test_many_rows_are_named_by_block():
    names = [f"h.{block}.{part}" for block in range(40) for part in ("attn.c_attn", "attn.c_proj")]
    assert _row_names(names)[0] == list(range(0, 80, 2)) and _row_names(names)[1][:2] == ["block 0", "block 1"]
    starts, written = _row_names([f"h.{block}.c_proj" for block in range(101)])
    assert starts == list(range(0, 101, 2)) and written[-1] == "block 100"
    assert _row_names(["a.b.0.x.y", "a.b.1.x.y", "x"])[1] == ["0.x.y", "1.x.y", "x"]


def result(topup, saliency="wanda", **more):
    return Result(0.7, saliency, topup, {"c4": 30.0}, block_sparsity=[0.6, 0.8], pruning_seconds=1.0, **more)


def drawn(found):
    return draw_figures("model", Result(0, "dense", "dense", {"c4": 20.0}), found)


@pytest.fixture
def calls(monkeypatch):
    """The functions that draw are only called; figure's function -> its arguments, by call."""
    seen = {}
    for name in ("plot_perplexity", "plot_by_block", "plot_by_row", "plot_by_lambda"):
        seen[name] = []
        monkeypatch.setattr(figures, name, lambda *given, name=name: seen[name].append(given))
    return seen


ROWS = {"0.q_proj": [0.6, 0.8]}
FAILED = Result(0.7, "ria", "uniform", error="no memory")


def test_a_comparison_gets_the_figures_that_it_allows(calls):
    found = drawn([result("uniform"), result("neuronal:steps=row", row_sparsity=ROWS), FAILED])
    both = ["perplexity-by-seconds", "block-sparsity-wanda-70"]
    assert list(found) == [*both, "row-sparsity-wanda-70-neuronal_steps_row"] and drawn([FAILED]) == {}
    found = drawn([result("uniform", bits_per_weight=6.0), result("rates", budget=2.4, bits_per_weight=2.4)])
    assert list(found) == [both[0], "perplexity-by-bits", both[1]]
    assert "perplexity-by-bits" not in drawn([result("uniform"), result("rates", budget=2.4)])
    tuned = [f"neuronal:block_lambdas=[{'0.05,' * 100}{last}]" for last in (0.3, 0.4)]
    found = drawn([result(topup, row_sparsity=ROWS) for topup in tuned])
    assert len(found) == 4 and max(map(len, found)) < 150, "a method of many words has a file"


def test_a_preset_is_named_as_one(calls, monkeypatch):
    best = result("best", "preset", row_sparsity=ROWS)
    found = drawn([result("search", "alps"), best])
    assert {"block-sparsity-preset-70", "row-sparsity-preset-70-best"} < set(found)
    assert calls["plot_by_row"][0][0] == "model, preset best, 70 % sparsity"
    monkeypatch.undo()
    written = texts(by_seconds([run("alps", "search"), run("preset", "default", perplexity=(math.inf, 50.0))]))
    assert {"preset default", "70 % sparsity (infinite: preset default)"} <= set(written) and "default" not in written


def test_lambdas_are_drawn_if_there_are_three_and_a_choice_among_several(calls):
    def single(lam, tried=1):
        return result(f"neuronal:{lam}-{tried}", block_lambda=lam, decisions={"block": {"candidates": [{}] * tried}})

    found = [single(0.05), single(0.1), single(0.2), single(0.1, tried=3)]
    assert "lambda-wanda-70" in drawn(found) and "lambda-wanda-70" not in drawn(found[:3])


def test_titles_name_the_model_the_saliency_and_the_target():
    """So that no two figures are the same."""
    found = drawn([result("owl", saliency, row_sparsity=ROWS) for saliency in ("wanda", "ria")])
    assert len({files[".svg"] for files in found.values()}) == len(found) == 5
    assert "model, ria, 70 % sparsity" in texts(found["block-sparsity-ria-70"])
    assert "model, ria + owl, 70 % sparsity" in texts(found["row-sparsity-ria-70-owl"])
    assert "model: perplexity on c4" in texts(found["perplexity-by-seconds"])
    found = drawn([result("rates", budget=2.4)])
    assert list(found) == ["perplexity-by-seconds"] and "2.4 bits" in texts(found["perplexity-by-seconds"])


def test_one_colour_per_method_and_one_scale_of_all_heat_maps(calls):
    found = [result("owl", "ria", row_sparsity=ROWS), result("owl", row_sparsity={"0.q": [0.3, 0.7], "1.q": [0.9]})]
    drawn([FAILED, *found, result("uniform")])
    styles = [given[3] for given in calls["plot_perplexity"]] + [given[-1] for given in calls["plot_by_block"]]
    assert len(styles) == 3 and all(style == styles[0] for style in styles) and list(styles[0]) == ["uniform", "owl"]
    assert [given[2:] for given in calls["plot_by_row"]] == [(0.3, 0.9)] * 2
    assert DENSE.mean_perplexity == pytest.approx(10)
