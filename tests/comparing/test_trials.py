from optimum_neuronal import compare
from optimum_neuronal.comparing import trials


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
