import pytest

from optimum_neuronal import compare
from optimum_neuronal.evaluation import trials
from optimum_neuronal.evaluation.trials import make_config


def test_dense_work_is_shared(llama, others, monkeypatch):
    checks, captures = [], []
    monkeypatch.setattr(trials, "check", lambda *a, o=trials.check: (checks.append(1), o(*a))[1])
    from optimum_neuronal.engine import runner as engine

    original = engine.check_replay
    monkeypatch.setattr(engine, "check_replay", lambda *a: (captures.append(1), original(*a))[1])
    compare(llama, saliencies=["wanda", "multiflow"], topups=["uniform", "neuronal:steps=block"], **others)
    assert len(checks) == len(captures) == 1


def test_out_of_memory_is_a_row_too(llama, others, monkeypatch):
    def fails(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(trials, "find_changes", fails)
    comparison = compare(llama, saliencies=["wanda"], topups=["uniform"], **others)
    assert comparison.failed[0].error == "MemoryError"


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
