import pytest

from optimum_neuronal.cli.compare_command import WAYS
from optimum_neuronal.cli.flags import CONFIG_FLAGS
from optimum_neuronal.comparing.combinations import find_combinations
from optimum_neuronal.comparing.experiments import EXPERIMENTS, LAMBDAS
from optimum_neuronal.topup import neuronal


def methods_of(name):
    given = EXPERIMENTS[name]
    fields = {key: value for key, value in given.items() if key in CONFIG_FLAGS and key not in WAYS}
    found = find_combinations(**{key: given[key] for key in WAYS if key in given}, config=fields)
    assert all(result.error is None and config.num_samples == 128 for result, config in found)
    return {(result.sparsity, *(m.partition(":")[0] for m in (result.saliency, result.topup))) for result, _ in found}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_combination_is_possible(name):
    assert methods_of(name)


def test_the_papers_tables():
    """Four saliencies by five top-ups, without those that the paper has no rows of, at three sparsities."""
    methods = methods_of("paper")
    assert len(methods) == 3 * (4 * 5 - 2) and (0.7, "sparsegpt", "neuronal") in methods
    assert not {(0.7, "sparsegpt", "dsnot"), (0.7, "sparsegpt", "alpha_pruning")} & methods
    topups = {"uniform", "dsnot", "owl", "besa", "dsa", "alpha_pruning", "neuronal"}
    assert {topup for _, _, topup in methods_of("paper-runtime")} == topups


def test_the_lambdas_of_the_figure_are_neuronals():
    assert LAMBDAS == neuronal.LAMBDAS
