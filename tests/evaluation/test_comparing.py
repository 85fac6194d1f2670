import json
import math

import pytest
import torch
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner, compare, evaluate_perplexity
from optimum_neuronal.evaluation import trials
from optimum_neuronal.evaluation.trials import make_config
from optimum_neuronal.saliency import SALIENCIES


SMALL = {"num_samples": 6, "num_alignment_samples": 2}
METHODS = {
    "saliencies": ["wanda", "magnitude"],
    "topups": ["uniform", "neuronal:block_lambdas=[0.1],row_lambdas=[0.1]"],
}


@pytest.fixture
def others(ids):
    return {"dataset": ids[:6], "evaluate": {"test": ids[6:]}, "sparsities": [0.5], **SMALL}


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("saliency", SALIENCIES.names())
def test_every_row_is_what_a_prune_alone_gives(family, saliency, ids, others):
    model = make_model(family)
    before = state(model)
    dense = evaluate_perplexity(model, None, ids[6:])
    comparison = compare(model, saliencies=[saliency], topups=["uniform", "neuronal"], **others)
    assert comparison.dense.perplexity["test"] == pytest.approx(dense, rel=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not comparison.failed and getattr(model.config, "sparsity_config", None) is None
    for result in comparison.results:
        steps = {"steps": "block"} if saliency == "sparsegpt" and result.topup == "neuronal" else {}
        config = NeuronALConfig(sparsity=0.5, saliency=saliency, topup=result.topup, **SMALL, **steps)
        pruner, alone = NeuronALPruner(config), make_model(family)
        pruner.prune(alone, ids[:6])
        assert result.perplexity["test"] == pytest.approx(evaluate_perplexity(alone, None, ids[6:]), rel=1e-5)
        assert result.achieved_sparsity == pruner.report.achieved_sparsity
        assert result.block_lambda == pruner.report.block_lambda and result.row_lambda == pruner.report.row_lambda
        assert result.block_sparsity == list(pruner.report.blocks.values())


def test_dense_work_is_shared(llama, others, monkeypatch):
    checks, captures = [], []
    monkeypatch.setattr(trials, "check", lambda *a, o=trials.check: (checks.append(1), o(*a))[1])
    from optimum_neuronal.engine import runner as engine

    original = engine.check_replay
    monkeypatch.setattr(engine, "check_replay", lambda *a: (captures.append(1), original(*a))[1])
    compare(llama, saliencies=["wanda", "multiflow"], topups=["uniform", "neuronal:steps=block"], **others)
    assert len(checks) == len(captures) == 1


def test_it_goes_on_where_it_was_interrupted(llama, others, tmp_path, monkeypatch):
    runs, run = [], trials.Trials.run

    def interrupted(self, *combination):
        runs.append(combination)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return run(self, *combination)

    monkeypatch.setattr(trials.Trials, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(llama, **METHODS, **others, output=tmp_path)
    assert len(json.loads((tmp_path / "comparison.json").read_text())["results"]) == 2
    comparison = compare(llama, **METHODS, **others, output=tmp_path)
    assert len(runs) == 3 + 2 and len(comparison.results) == 4, "two were finished"
    compare(llama, **METHODS, **others, output=tmp_path)
    assert len(runs) == 5
    compare(llama, **METHODS, **others, output=tmp_path, overwrite=True)
    assert len(runs) == 9


@pytest.mark.parametrize("content", ["", "{}", '{"what": 1}', "[1, 2]"])
def test_a_damaged_record_is_made_anew(content, llama, others, tmp_path):
    first = compare(llama, saliencies=["magnitude"], topups=["uniform"], **others, output=tmp_path)
    for record in (tmp_path / "results").iterdir():
        record.write_text(content)
    second = compare(llama, saliencies=["magnitude"], topups=["uniform"], **others, output=tmp_path)
    assert second.results[0].perplexity == first.results[0].perplexity


@pytest.mark.parametrize("change", ["seed", "calibration", "test", "model"])
def test_what_depends_on_something_else_is_run_again(change, llama, ids, others, tmp_path):
    first = compare(llama, saliencies=["wanda"], topups=["uniform"], **others, output=tmp_path)
    if change == "seed":
        others["seed"] = 1
    elif change == "calibration":
        others["dataset"] = ids[1:7]
    elif change == "test":
        others["evaluate"] = {"test": ids[5:]}
    else:
        llama = make_model("llama", seed=1)
    second = compare(llama, saliencies=["wanda"], topups=["uniform"], **others, output=tmp_path)
    expected = 4 if change != "seed" else 3  # the dense model's figures do not depend on the config
    assert len(list((tmp_path / "results").iterdir())) == expected
    assert change == "seed" or first.results[0].perplexity != second.results[0].perplexity


def test_one_that_fails_is_a_row_with_its_error(llama, others, tmp_path, monkeypatch):
    wanda = SALIENCIES.get("wanda")
    monkeypatch.setattr(wanda, "score", lambda self, weight, activation: weight.abs() * math.nan)
    comparison = compare(llama, **METHODS, **others, output=tmp_path)
    assert [result.error is None for result in comparison.results] == [False, False, True, True]
    assert "is not finite" in comparison.failed[0].error and "failed: The saliency of" in str(comparison)
    monkeypatch.undo()
    assert not compare(llama, **METHODS, **others, output=tmp_path).failed, "failures are tried again"


def test_impossible_combinations_are_rows_too(llama, others):
    both = ["uniform", "neuronal:steps=row"]
    comparison = compare(llama, saliencies=["wanda", "sparsegpt"], topups=both, **others)
    assert [bool(result.error) for result in comparison.results] == [False, False, False, True]
    assert "updates all rows of a weight together" in comparison.failed[0].error


def test_out_of_memory_is_a_row_too(llama, others, monkeypatch):
    def fails(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(trials, "find_changes", fails)
    comparison = compare(llama, saliencies=["wanda"], topups=["uniform"], **others)
    assert comparison.failed[0].error == "MemoryError"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"saliencies": ["wandq"]}, "Did you mean 'wanda'"),
        ({"topups": ["uniforn:x=1"]}, "Did you mean 'uniform'"),
        ({"topups": ["uniform:x"]}, "expected NAME or NAME:KEY=VALUE"),
        ({"topups": []}, "nothing to compare"),
        ({"sparsities": [1.5]}, "No combination is possible: sparsity is 1.5"),
        ({"num_samples": 100}, "The token ids hold 6 sequences"),
    ],
)
def test_bad_input_is_refused_before_work(arguments, message, llama, others, monkeypatch):
    monkeypatch.setattr(trials, "find_changes", lambda *args: pytest.fail("work began"))
    monkeypatch.setattr(trials, "evaluate_perplexity", lambda *args, **kwargs: pytest.fail("work began"))
    with pytest.raises(ValueError, match=message):
        compare(llama, **{"saliencies": ["wanda"], "topups": ["uniform"], **others, **arguments})


def test_fields_of_other_topups_cause_no_warning(llama, others, monkeypatch):
    said = []
    monkeypatch.setattr("optimum_neuronal.config_aliases.logger.warning", said.append)
    compare(llama, saliencies=["wanda"], topups=["uniform", "neuronal"], **others, block_lambdas=(0.1,))
    assert not said


def test_a_shared_hyper_parameter_name_goes_to_the_config_for_every_method(own_topup):
    others = {"seed": 7, "batch_size": 2, "block_lambdas": (0.1,)}
    for topup in ("uniform", "neuronal", "search", "test-only:seed=5"):
        config = make_config(0.7, "wanda", topup, "c4", others)
        assert (config.seed, config.batch_size) == (7, 2)
    assert config.make_methods().topup == own_topup(seed=5)


def test_compare_gives_aliases_to_their_topups_beneath_what_a_method_says_itself():
    others = {"block_lambdas": (0.1,), "reference": "dense"}
    own = make_config(0.7, "wanda", "neuronal:block_lambdas=[0.2]", "c4", others)
    assert own.topup_args == {"block_lambdas": [0.2], "reference": "dense"}
    assert make_config(0.7, "wanda", "search", "c4", others).topup_args == {}
    assert make_config(0.7, "sparsegpt", "neuronal", "c4", {}).topup_args == {"steps": "block"}
    with pytest.raises(ValueError, match="updates all rows"):
        make_config(0.7, "sparsegpt", "neuronal", "c4", {"steps": "both"})
