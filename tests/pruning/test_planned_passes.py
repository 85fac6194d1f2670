from dataclasses import replace

from conftest import make_model

from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.final_pass import PruningPass
from optimum_neuronal.pruning.planned_passes import all_passes, planned_passes, planned_stages
from optimum_neuronal.trials.alignment import AlignmentPass
from optimum_neuronal.trials.output_errors import OutputPass

from .conftest import config_of


def test_the_dense_models_pass_comes_once_before_the_first_that_needs_it():
    asked = [AlignmentPass("first", 2, "sparse-stream"), OutputPass("second", 3), OutputPass("third", 1)]
    labels = [step.label for step in all_passes(asked, [PruningPass("Pruning", 1)])]
    assert labels == ["Check", "first", "Dense activations", "second", "third", "Pruning"]
    assert [step.label for step in all_passes(asked[:1], [])] == ["Check", "first"]


def stages_of(**fields):
    config = config_of(**fields)
    return planned_stages(config.make_methods(), config, find_decoder(make_model("llama")), 16)


def test_every_stage_has_its_passes_and_its_share_of_the_work():
    plain = stages_of(topup="neuronal", steps="block")
    assert {label: stage.passes for label, stage in plain.items()} == {"Check": 1, "Block step": 2, "Pruning": 1}
    assert all(stage.work > 0 for stage in plain.values())


def test_a_refit_is_part_of_the_pruning_and_levels_are_a_stage():
    own = {"saliency": "alps", "topup": "search", "num_samples": 16}
    best, default = stages_of(**own, refit_epochs=20), stages_of(**own)
    assert list(best) == ["Check", "Levels", "Dense activations", "Search", "Pruning"]
    assert best["Search"].passes == 8 and best["Pruning"].passes == 1
    assert best["Pruning"].work > default["Pruning"].work and best["Levels"] == default["Levels"]


def test_a_search_tries_as_many_plans_as_it_may():
    for budget in (9, 16, 58):
        config = config_of(saliency="wanda", topup="search", topup_args={"budget": budget})
        passes = planned_passes(config.make_methods(), config)
        assert sum(step.plans * step.times for step in passes if step.label == "Search") == budget


def test_a_refit_is_rounded_by_stages_with_a_budget_of_bits_too():
    own = {"saliency": "alps", "topup": "uniform", "num_samples": 16, "refit_epochs": 4}
    plain, rounded, budgeted = (config_of(**own, **more) for more in ({}, {"value_bits": 3}, {"bits_per_weight": 3.0}))
    budgeted = replace(budgeted, sparsity=None)
    found = [planned_passes(config.make_methods(), config)[-1] for config in (plain, rounded, budgeted)]
    assert found[1] == found[2] != found[0]
