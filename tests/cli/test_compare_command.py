import json
import math

import pytest

from optimum_neuronal.comparing.experiments import EXPERIMENTS
from optimum_neuronal.saliency import SALIENCIES


TUNED = "neuronal:block_lambdas=[0.1],row_lambdas=[0.0,0.1]"


@pytest.fixture
def arguments(dense, tmp_path):
    text = tmp_path / "text.txt"
    own = ("--num-samples", 8, "--num-alignment-samples", 2, "--seq-length", 16, "--max-windows", 4)
    files = ("--model", dense, "--dataset", text, "--evaluate", text, "--output", tmp_path / "out")
    return ["compare", *files, *own]


def test_tables_files_and_figures(run, arguments, tmp_path):
    pytest.importorskip("matplotlib")
    ways = ("--saliency", "wanda", "magnitude", "--topup", "uniform", TUNED)
    ways += ("--config-presets", "fast", "--sparsity", 0.5, 0.7)
    shown = run(*arguments, *ways, "--plots", "wanda+uniform", "--keep", tmp_path / "kept")
    assert len([*(tmp_path / "kept").iterdir()]) == 10
    assert "PPLFac, 70%" in shown and "preset fast" in shown
    out = tmp_path / "out"
    results = json.loads((out / "comparison.json").read_text())["results"]
    assert len(results) == 8 + 2
    assert (out / "perplexity-by-seconds.png").exists() and "perplexity-by-seconds.png" in shown
    names = {path.name for path in out.iterdir() if path.suffix != ".png"}
    assert names == {"comparison.json", "comparison.md", "comparison.tex", "finished"}
    assert run(*arguments, *ways, "--plots") == shown, "resumed, seconds included"


def test_what_is_impossible_can_be_left_out_and_what_fails_sets_the_exit_status(run, arguments, monkeypatch):
    ways = ("--saliency", "wanda", "sparsegpt", "--topup", "dsnot", "--sparsity", 0.5)
    with pytest.raises(SystemExit, match=r"sparsegpt \+ dsnot, 50% sparsity: .* --without sparsegpt\+dsnot"):
        run(*arguments, *ways)
    monkeypatch.setattr(SALIENCIES.get("wanda"), "score", lambda self, weight, activation: weight * math.nan)
    with pytest.raises(SystemExit, match="1 of 1 combinations failed, see the table"):
        run(*arguments, *ways, "--without", "sparsegpt+dsnot")


def test_a_file_gives_fields_that_flags_override(run, arguments, tmp_path):
    """Hyperparameters are for the file's method, or for a flag's if it names none."""
    owl = {"topup": "owl", "topup_args": {"half_width": 0.05}}
    for fields, flags, titles in (
        (owl, (), ["owl, half_width=0.05"]),
        (owl, ("--topup", "uniform", "owl"), ["uniform", "owl"]),
        ({"topup_args": {"block_lambdas": [0.13]}}, ("--topup", "neuronal"), ["neuronal"]),
    ):
        config = {"config": {"saliency": "wanda", "sparsity": 0.6, **fields}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        shown = run(*arguments, "--config", tmp_path / "config.json", *flags, "--overwrite")
        found = json.loads((tmp_path / "out" / "comparison.json").read_text())["results"]
        assert [(one["saliency"], one["sparsity"], one["topup"].partition(", seq")[0]) for one in found] == [
            ("wanda", 0.6, title) for title in titles
        ]
    assert "block 0.13" in shown


def test_an_experiment_a_sweep_and_means(run, arguments, dense, tmp_path, monkeypatch):
    """Flags replace an experiment's arguments. Means are over the directories of finished comparisons."""
    monkeypatch.setitem(EXPERIMENTS, "paper", {"topups": ["uniform", "owl"], "sparsities": [0.5], "tasks": ["boolq"]})
    few = ("--preset", "paper", "--saliency", "magnitude", "--tasks", "--topup", "owl", "--seed", 0, 1)
    shown = run(*arguments, *few, "--num-alignment-samples", 2, "--window", 16)
    assert "Means over seed 0, 1, ± the standard deviation." in shown and "(4 x 16 tokens)" in shown
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())["results"]
    assert [result["config"]["seed"] for result in found] == [0, 1] and found[0]["topup"] == "owl, authors"
    shown = run("compare", "--merge", tmp_path / "out", tmp_path / "out", "--output", tmp_path / "means")
    assert "PPLFac, 50%" in shown and (tmp_path / "means" / "means.md").exists()
    with pytest.raises(SystemExit, match="--model is missing: give it, or --merge"):
        run("compare")


def test_weights_on_disk_and_spread_by_accelerate(run, arguments, tmp_path):
    given = ("--saliency", "wanda", "--topup", "uniform", "--sparsity", 0.5)
    run(*arguments, *given)
    run(*arguments, *given, "--output", tmp_path / "streamed", "--stream", "--device", "cpu")
    run(*arguments, *given, "--output", tmp_path / "spread", "--device-map", "auto")
    for name in ("streamed", "spread"):
        one, two = (json.loads((tmp_path / own / "comparison.json").read_text()) for own in ("out", name))
        assert one["results"][0]["perplexity"] == pytest.approx(two["results"][0]["perplexity"])
    assert not list(tmp_path.glob(".*")), "the folders for rewritten weights are gone"


def test_mistakes_are_found_before_a_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags in (("--plots",), ("--overwrite",), ("--model", "me/mine"), ("--revision", "v2")):
        with pytest.raises(SystemExit, match="--merge prunes nothing and takes --output alone"):
            run("compare", "--merge", tmp_path, *flags)
    (tmp_path / "comparison.md").write_text("mine")
    (tmp_path / "own.json").write_text('{"dataset": ["c4", "ptb"]}')
    with pytest.raises(SystemExit, match="./gone does not exist"):
        run("compare", "--config", "own.json", "--dataset", "c4", "ptb", "--model", "./gone", "--output", "o")
    for arguments, message in (
        (("--topup", "owl:half_widht=1"), "wanda .*Did you mean 'half_width'"),
        (("--sparsity", "70"), "sparsities is 70"),
        (("--config", "own.json"), "compare calibrates on one dataset at a time"),
        (("--output", "."), "something else than a comp.* --overwrite"),
        (("--keep", "own.json"), "Cannot keep models in own.json"),
        (("--plots", "wanda+alpha"), r"line is 'wanda\+alpha': expected one of .*Did you mean 'wanda"),
    ):
        with pytest.raises(SystemExit, match=message):
            run("compare", "--model", "me/never-looked-at", *arguments)
