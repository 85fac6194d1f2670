import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.comparing.results import Result
from optimum_neuronal.comparing.settings import ComparisonSettings, make_config


GIVEN = {"saliencies": ["wanda"], "topups": ["uniform"], "sparsities": [0.5], "dataset": [[1, 2]], "evaluate": {}}


def settings(**changes):
    return ComparisonSettings(**GIVEN | changes)


def test_a_combination_occurs_once():
    found = settings(saliencies=["wanda", "wanda"], sparsities=(0.5, 0.6, 0.5), evaluate={"own": [[1, 2]]})
    expected = [Result(sparsity, "wanda", "uniform") for sparsity in (0.5, 0.6)]
    assert [result for result, _ in found.combinations] == expected and len(found.possible) == 2


def test_budgets_follow_the_combinations_of_methods():
    others = {"num_samples": 16, "refit_epochs": 0, "reconstruct": None, "rotate": False}
    found = settings(sparsities=[0.5, 0.6], bits_per_weight=iter([2.4, 3, 2.4]), config=others).combinations
    assert [(key.sparsity, key.budget) for key, _ in found] == [(0.5, None), (0.6, None), (0.0, 2.4), (0.0, 3)]
    assert [config.bits_per_weight for _, config in found] == [None, None, 2.4, 3]
    assert all(config.num_samples == 16 for _, config in found)


def test_a_preset_has_a_row_at_each_sparsity_and_chooses_the_methods_itself():
    others = {"num_samples": 16, "seed": 3}
    given = {"sparsities": [0.5, 0.6], "presets": iter(["paper", "best", "paper"]), "bits_per_weight": [3]}
    found = settings(**given, config=others).combinations
    assert [key.method for key, _ in found] == [
        "wanda + uniform, 50.00%",
        "wanda + uniform, 60.00%",
        *(f"preset {name}, {sparsity}" for sparsity in ("50.00%", "60.00%") for name in ("paper", "best")),
        "quantised, 3 bits",
    ]
    for key, config in found[2:-1]:
        assert config == NeuronALConfig.preset(key.topup, sparsity=key.sparsity, dataset=None, **others)
    assert make_config(found[2][0], "c4", others).dataset == "c4"
    for without in ({"saliencies": []}, {"topups": []}):
        alone = settings(**without, presets=["fast"])
        assert [config.saliency for config in alone.possible] == ["alps"]


def test_what_only_zeros_know_is_left_out_of_quantised_ones():
    for more in ({"reconstruct": "dense"}, {"refit_epochs": 2}, {"rotate": True}):
        found = settings(saliencies=["alps"], bits_per_weight=[2.4], config=more)
        assert len(found.possible) == 2, more
    assert [key.method for key, _ in settings(sparsities=[], bits_per_weight=[3]).combinations] == [
        "quantised, 3 bits"
    ]


def test_mistakes():
    for changes, error, message in (
        ({"bits_per_weight": [3, 12]}, ValueError, "bits_per_weight is 12: expected a number above 2, at most 9"),
        ({"bits_per_weight": 3}, TypeError, "bits_per_weight is 3: expected several, such as .2.4, 3."),
        ({"bits_per_weight": ["4"]}, TypeError, "bits_per_weight is '4'"),
        ({"sparsities": []}, ValueError, "nothing to compare"),
        ({"topups": []}, ValueError, "nothing to compare: .*, a preset and a sparsity, or"),
        (
            {"presets": ["papr"]},
            ValueError,
            "presets is 'papr': expected one of 'paper', .* Did you mean 'paper'",
        ),
        ({"presets": "best"}, TypeError, "presets is 'best': expected several, such as .'fast'."),
        ({"tasks": ["boolq"], "limit": 0}, ValueError, "limit is 0: expected a whole number"),
        ({"tasks": ["boolq"], "include_path": "absent"}, ValueError, "'absent' is not a folder"),
        ({"config": {"embedding_bits": 8}}, ValueError, "leave embedding_bits out"),
    ):
        with pytest.raises(error, match=message):
            settings(**changes)


def test_a_shared_hyper_parameter_name_goes_to_the_config_for_every_method(own_topup):
    others = {"seed": 7, "min_expert_tokens": 2}
    for topup in ("uniform", "neuronal", "search", "test-only:seed=5"):
        config = make_config(Result(0.7, "wanda", topup), "c4", others)
        assert (config.seed, config.min_expert_tokens) == (7, 2)
    assert config.make_methods().topup == own_topup(seed=5)


def test_rows_are_left_alone_where_the_saliency_knows_none():
    assert make_config(Result(0.7, "sparsegpt", "neuronal"), "c4", {}).topup_args == {"steps": "block"}
    with pytest.raises(ValueError, match="updates all rows"):
        make_config(Result(0.7, "sparsegpt", "neuronal:steps=both"), "c4", {})
