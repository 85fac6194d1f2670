import pytest

from optimum_neuronal.comparing import study
from optimum_neuronal.comparing.experiments import EXPERIMENTS, experiment


@pytest.fixture
def methods_of(monkeypatch):
    """Return what an experiment prunes with, without reading its tasks: sparsity, saliency and top-up."""
    monkeypatch.setattr(study, "load_tasks", lambda *_, **__: None)

    def methods_of(name):
        found = study.Study.of(EXPERIMENTS[name]).combinations
        assert all(one.config.num_samples == 128 for one in found)
        return {(one.config.sparsity, one.config.saliency, one.config.topup) for one in found}

    return methods_of


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_combination_is_possible(name, methods_of):
    assert methods_of(name)


def test_the_papers_tables(methods_of):
    """Four saliencies by five top-ups, without those that the paper has no rows of, at three sparsities."""
    methods = methods_of("paper")
    assert len(methods) == 3 * (4 * 5 - 2) and (0.7, "sparsegpt", "neuronal") in methods
    assert not {(0.7, "sparsegpt", "dsnot"), (0.7, "sparsegpt", "alpha_pruning")} & methods
    topups = {"uniform", "dsnot", "owl", "alpha_pruning", "neuronal"}
    assert {topup for _, _, topup in methods_of("paper-runtime")} == topups


def test_given_methods_have_the_variants_of_the_papers_tables():
    given = ["neuronal:steps=block", "neuronal:variant=sequence", "owl", "dlp"]
    resolved = ["neuronal:variant=authors,steps=block", "neuronal:variant=sequence", "owl:variant=authors", "dlp"]
    assert experiment("paper", topups=given)["topups"] == resolved
    found = experiment("paper", saliencies=["sparsegpt", "wanda"], sparsities=[0.7])
    assert found["saliencies"] == ["sparsegpt:variant=authors", "wanda"] and found["sparsities"] == [0.7]
    assert experiment("paper") == EXPERIMENTS["paper"] and found["sampling"] == "authors"
    with pytest.raises(ValueError, match="experiment is 'papr'.*Did you mean 'paper'"):
        experiment("papr")
