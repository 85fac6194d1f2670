import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import make_model
from profiles import by_day
from turning import ties

from optimum_neuronal import NeuronALConfig, NeuronALPruner, compare, densify, evaluate_perplexity
from optimum_neuronal.blocks import runner
from optimum_neuronal.comparing import comparing
from optimum_neuronal.comparing.results import Result
from optimum_neuronal.rotation.learning import Rotation
from optimum_neuronal.saliency import SALIENCIES

from .conftest import SMALL


TUNED = "neuronal:block_lambdas=[0.05,0.1],row_lambdas=[0.0,0.1]"
METHODS = {"saliencies": ["wanda", "magnitude"], "topups": ["uniform", TUNED]}
ONE = {"saliencies": ["magnitude"], "topups": ["uniform"]}


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.usefixtures("quick_alps")
@pytest.mark.parametrize("family", by_day(["llama", "mixtral", "gpt2"], "llama"))
@pytest.mark.parametrize("saliency", SALIENCIES.names())
def test_every_row_is_what_a_prune_alone_gives(family, saliency, ids, others):
    model = make_model(family)
    before = state(model)
    dense = evaluate_perplexity(model, None, ids[6:])
    comparison = compare(model, saliencies=[saliency], topups=["uniform", TUNED], **others)
    assert comparison.dense.perplexity["test"] == pytest.approx(dense, rel=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not comparison.failed and getattr(model.config, "sparsity_config", None) is None
    for result in comparison.results:
        no_rows = (saliency, result.topup) == ("sparsegpt", TUNED)  # it knows none: the block step alone
        topup = f"{TUNED},steps=block" if no_rows else result.topup
        config = NeuronALConfig(sparsity=0.5, saliency=saliency, topup=topup, **SMALL)
        pruner, alone = NeuronALPruner(config), make_model(family)
        pruner.prune(alone, ids[:6])
        assert result.perplexity["test"] == pytest.approx(evaluate_perplexity(alone, None, ids[6:]), rel=1e-5)
        assert result.achieved_sparsity == pruner.report.achieved_sparsity
        assert result.block_lambda == pruner.report.block_lambda and result.row_lambda == pruner.report.row_lambda
        assert (result.row_lambda is None) == (result.topup == "uniform" or no_rows)
        assert result.block_sparsity == list(pruner.report.blocks.values())


def test_every_row_of_a_preset_is_what_a_prune_alone_gives(ids, others, tmp_path):
    """A rotated model's weights are put back."""
    model = make_model("gemma")
    before, tied = state(model), ties(model)
    given = {**others, "saliencies": [], "topups": [], "presets": ["fast", "best"], "refit_epochs": 0}
    comparison = compare(model, **given, output=tmp_path)
    assert not comparison.failed and ties(model) == tied
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for result, rotated in zip(comparison.results, (False, True), strict=True):
        pruner, alone = NeuronALPruner(NeuronALConfig.preset(result.topup, sparsity=0.5, refit_epochs=0, **SMALL)), make_model("gemma")
        pruner.prune(alone, ids[:6])
        assert result.perplexity["test"] == pytest.approx(evaluate_perplexity(alone, None, ids[6:]), rel=1e-5)
        assert result.block_sparsity == list(pruner.report.blocks.values())
        assert result.config["rotate"] is bool(pruner.report.rotation) is (result.rotation_seconds > 0) is rotated
        assert result.seconds > result.rotation_seconds
    again = compare(model, **given, output=tmp_path)
    assert [vars(one) for one in again.results] == [vars(one) for one in comparison.results], "from records"


def test_it_goes_on_where_it_was_interrupted(llama, others, tmp_path, monkeypatch):
    runs, run = [], comparing.Measurements.run

    def interrupted(self, combination, config):
        runs.append(combination)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return run(self, combination, config)

    monkeypatch.setattr(comparing.Measurements, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(llama, **METHODS, **others, output=tmp_path)
    assert len(json.loads((tmp_path / "comparison.json").read_text())["results"]) == 2
    comparison = compare(llama, **METHODS, **others, output=tmp_path)
    assert len(runs) == 3 + 2 and len(comparison.results) == 4, "two were finished"
    compare(llama, **METHODS, **others, output=tmp_path)
    assert len(runs) == 5
    compare(llama, **METHODS, **others, output=tmp_path, overwrite=True)
    assert len(runs) == 9


def test_quantised_models_are_rows_beside_the_others(ids, others, tmp_path):
    """Every row is what a prune alone gives, and says what a weight takes."""
    model = make_model("llama", num_hidden_layers=2)
    before = state(model)
    given = {**ONE, **others, "bits_per_weight": [6.0, 7], "output": tmp_path}
    comparison = compare(model, **given)
    assert not comparison.failed and [result.budget for result in comparison.results] == [None, 6.0, 7]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert comparison.dense.bits_per_weight == 32.0
    for result in comparison.results[1:]:
        pruner = NeuronALPruner(NeuronALConfig(bits_per_weight=result.budget, **SMALL))
        alone = densify(pruner.prune(make_model("llama", num_hidden_layers=2), ids[:6]))
        assert result.perplexity["test"] == pytest.approx(evaluate_perplexity(alone, None, ids[6:]), rel=1e-5)
        assert result.bits_per_weight == pruner.report.bits_per_weight <= result.budget
    again = compare(model, **given)
    assert [vars(one) for one in again.results] == [vars(one) for one in comparison.results], "from records"


def test_pages_of_others_are_not_replaced(others, tmp_path):
    """That is told before the model, which is not there, is looked for."""
    (tmp_path / "comparison.md").write_text("mine")
    with pytest.raises(FileExistsError, match="comparison.md was not written by a comparison"):
        compare("./never-looked-at", **METHODS, **others, output=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.md"]


def test_one_that_fails_is_a_row_with_its_error(llama, others, tmp_path, monkeypatch):
    wanda = SALIENCIES.get("wanda")
    monkeypatch.setattr(wanda, "score", lambda self, weight, activation: weight.abs() * math.nan)
    comparison = compare(llama, **METHODS, **others, output=tmp_path)
    assert [result.error is None for result in comparison.results] == [False, False, True, True]
    assert "is not finite" in comparison.failed[0].error and "failed: The saliency of" in str(comparison)
    monkeypatch.undo()
    assert not compare(llama, **METHODS, **others, output=tmp_path).failed, "failures are tried again"


def test_impossible_combinations_are_rows_too(llama, others):
    both = ["uniform", "dsnot"]
    comparison = compare(llama, saliencies=["wanda", "sparsegpt"], topups=both, **others)
    assert [bool(result.error) for result in comparison.results] == [False, False, False, True]
    assert "updates the others too" in comparison.failed[0].error


def test_bad_input_is_refused_before_work(llama, others, monkeypatch):
    monkeypatch.setattr(comparing, "find_changes", lambda *args: pytest.fail("work began"))
    monkeypatch.setattr(comparing, "evaluate_perplexity", lambda *args, **kwargs: pytest.fail("work began"))
    for arguments, message in (
        ({"saliencies": ["wandq"]}, "Did you mean 'wanda'"),
        ({"topups": ["uniforn:x=1"]}, "Did you mean 'uniform'"),
        ({"topups": ["uniform:x"]}, "expected NAME or NAME:KEY=VALUE"),
        ({"topups": []}, "nothing to compare"),
        ({"sparsities": [1.5]}, "sparsities is 1.5: expected a number from 0 to 1"),
        ({"num_samples": 100}, "The token ids hold 6 sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(llama, **{"saliencies": ["wanda"], "topups": ["uniform"], **others, **arguments})


def test_test_files_of_the_same_name_and_counts(llama, ids, tokenizer, tmp_path):
    for folder, step in (("a", 3), ("b", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.txt").write_text(" ".join(f"w{i * step % 60}" for i in range(64)))
    model = make_model("llama", vocab_size=256)
    files = [tmp_path / folder / "test.txt" for folder in ("a", "b")]
    fields = {**ONE, "sparsities": [0.5], "seq_length": 16}
    comparison = compare(model, tokenizer, **fields, evaluate=(file for file in files))
    expected = [evaluate_perplexity(model, tokenizer, file, 16) for file in files]
    assert comparison.dense.perplexity == pytest.approx(dict(zip(("test.txt", "test.txt (2)"), expected)), rel=1e-5)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"max_windows is {count}: expected a whole number of at least 1"):
            compare(model, tokenizer, **fields, evaluate=files, max_windows=count)
    with pytest.raises(TypeError, match="max_windows is 1.5: expected a whole number"):
        compare(model, tokenizer, **fields, evaluate=files, max_windows=1.5)


def test_what_is_given_may_come_from_generators(llama, ids, others):
    given = {**others, "sparsities": [0.5], "evaluate": {"test": ids[6:]}, "targets": ["mlp"], "ignore": ["down_proj"]}
    listed = compare(llama, saliencies=["magnitude", "wanda"], topups=["uniform"], **given)
    given |= {name: (value for value in given[name]) for name in ("sparsities", "targets", "ignore")}
    saliencies = (name for name in ("magnitude", "wanda"))
    generated = compare(llama, saliencies=saliencies, topups=iter(["uniform"]), **given)
    assert [result.perplexity for result in generated.results] == [result.perplexity for result in listed.results]
    assert [result.config["ignore"] for result in generated.results] == [["down_proj"]] * 2
    with pytest.raises(TypeError, match="saliencies is .wanda.: expected several"):
        compare(llama, saliencies="wanda", **others)


def test_dense_work_is_shared(llama, others, monkeypatch):
    checks, captures = [], []
    monkeypatch.setattr(comparing, "check", lambda *a, o=comparing.check: (checks.append(1), o(*a))[1])
    original = runner.check_replay
    monkeypatch.setattr(runner, "check_replay", lambda *a: (captures.append(1), original(*a))[1])
    compare(llama, saliencies=["wanda", "multiflow"], topups=["uniform", "neuronal:steps=block"], **others)
    assert len(checks) == len(captures) == 1


def test_out_of_memory_is_a_row_too(llama, others, monkeypatch):
    def fails(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(comparing, "find_changes", fails)
    comparison = compare(llama, saliencies=["wanda"], topups=["uniform"], **others)
    assert comparison.failed[0].error == "MemoryError"


def test_a_damaged_record_is_made_anew(llama, others, tmp_path):
    first = compare(llama, **ONE, **others, output=tmp_path)
    for content in ("", "{}", '{"what": 1}', "[1, 2]"):
        for record in (tmp_path / "results").iterdir():
            record.write_text(content)
        second = compare(llama, **ONE, **others, output=tmp_path)
        assert second.results[0].perplexity == first.results[0].perplexity


def test_what_depends_on_something_else_is_run_again(llama, ids, others, tmp_path):
    methods = {"saliencies": ["wanda"], "topups": ["uniform"]}
    first = compare(llama, **methods, **others, output=tmp_path)
    records = len(list((tmp_path / "results").iterdir()))
    for model, change in (
        (llama, {"seed": 1}),
        (llama, {"dataset": ids[1:7]}),
        (llama, {"evaluate": {"test": ids[5:]}}),
        (make_model("llama", seed=1), {}),
    ):
        second = compare(model, **methods, **{**others, **change}, output=tmp_path)
        more = len(list((tmp_path / "results").iterdir())) - records
        assert more == (1 if "seed" in change else 2), "the dense model's figures do not depend on the config"
        assert "seed" in change or first.results[0].perplexity != second.results[0].perplexity
        records += more


class Make:
    """Maker of a result whose seconds are its number."""

    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def __call__(self):
        self.calls += 1
        return Result(0.7, "wanda", "owl:m=7", {"test": 12.5}, pruning_seconds=self.calls, error=self.error)


OWL = Result(0.7, "wanda", "owl:m=7")


def recorded(folder, make, combination=OWL, config=None, depends_on="a", overwrite=False):
    return comparing._recorded(folder, overwrite, {"model": depends_on}, combination, config or {}, make)


def test_a_finished_result_is_read_whole(tmp_path):
    make = Make()
    assert recorded(tmp_path, make) == recorded(tmp_path, make) and make.calls == 1
    (record,) = (tmp_path / "results").iterdir()
    assert record.name.startswith("0.7-wanda-owl_m_7-") and record.suffix == ".json"
    recorded(tmp_path, make, replace(OWL, budget=2.4))
    assert any(path.name.startswith("0.7-wanda-owl_m_7-2.4bits-") for path in record.parent.iterdir())
    recorded(tmp_path, make, replace(OWL, sparsity=0.6))
    recorded(tmp_path, make, config={"seed": 1})
    recorded(tmp_path, make, depends_on="b")
    assert make.calls == 5 == len(list(record.parent.iterdir()))


def test_failures_are_not_kept_and_nothing_is_without_a_directory(tmp_path):
    for folder, error in ((tmp_path, "out of memory"), (None, None)):
        make = Make(error)
        for _ in range(2):
            recorded(folder, make)
        assert make.calls == 2
    assert not list(tmp_path.iterdir())


def test_what_is_recorded_may_be_made_again(tmp_path):
    make = Make()
    for overwrite in (False, True, False):
        found = recorded(tmp_path, make, overwrite=overwrite)
    assert make.calls == 2 and found.pruning_seconds == 2


def test_every_row_is_of_the_rotated_model(ids, others, monkeypatch):
    """It is rotated for each, and put back; the rotation of a sparsity is learned once, and its hidden states are shared."""
    model, learned = make_model("gemma"), []
    learn, before, tied = Rotation.learn, state(model), ties(model)
    monkeypatch.setattr(Rotation, "learn", lambda *args: learned.append(args) or learn(*args))
    arguments = {
        **others,
        "saliencies": ["wanda", "magnitude"],
        "topups": ["uniform", "owl"],
        "sparsities": [0.5, 0.7],
    }
    turned = {"rotate": True, "rotate_args": {"steps": 5, "learning_rate": 0.1, "fisher_samples": 2}}
    comparison = compare(model, **arguments, **turned)
    assert not comparison.failed and len(learned) == len(arguments["sparsities"])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()) and ties(model) == tied
    plain = compare(model, **arguments)
    assert comparison.dense.perplexity == plain.dense.perplexity
    for result, without in zip(comparison.results, plain.results):
        assert result.perplexity["test"] != without.perplexity["test"], "the dense model has other hidden states"
        config = NeuronALConfig(result.sparsity, saliency=result.saliency, topup=result.topup, **turned, **SMALL)
        alone = NeuronALPruner(config).prune(make_model("gemma"), ids[:6])
        assert result.perplexity["test"] == pytest.approx(evaluate_perplexity(alone, None, ids[6:]), rel=1e-5)
