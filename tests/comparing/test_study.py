import json
from dataclasses import asdict

import numpy as np
import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.comparing.study import Study


GIVEN = {"saliencies": ["wanda"], "topups": ["uniform"], "sparsities": [0.5], "dataset": [[1, 2]]}


def find(**changes):
    return [(one.result, one.config) for one in Study(**GIVEN | changes).combinations]


def test_arguments_are_sorted():
    """What is neither combined nor measured is a field of the config."""
    study = Study.of(GIVEN | {"evaluate": ["wikitext2"], "window": 8, "seed": 3, "overwrite": True})
    assert study.config == {"seed": 3} and study.window == 8 and list(study.test_sets) == ["wikitext2"]
    assert [one.config.seed for one in study.combinations] == [3] and study.overwrite


def test_each_occurs_once_methods_first_then_presets():
    args = {"saliencies": ["wanda", "wanda"], "sparsities": (0.5, 0.6, 0.5), "presets": iter(["fast", "best", "fast"])}
    found = find(**args, config={"num_samples": 16, "seed": 3})
    assert [result.method for result, _ in found] == [
        "wanda + uniform, 50% sparsity",
        "wanda + uniform, 60% sparsity",
        *(
            f"preset {name} (alps + uniform{refit}), {amount}% sparsity"
            for name, refit in (("fast", ""), ("best", ", refit of 6 epochs"))
            for amount in (50, 60)
        ),
    ]
    assert all(config.num_samples == 16 and config.seed == 3 for _, config in found)
    expected = NeuronALConfig.preset("best", sparsity=0.6, dataset=None, num_samples=16, seed=3)
    assert found[5][1].to_dict() == expected.to_dict()
    found = find(sparsities=[0.6, 0.7], presets=["two-four"])  # at its own sparsity
    assert [one.method for one, _ in found[2:]] == ["preset two-four (alps + uniform, pattern 2:4), 50% sparsity"]


def test_hyperparameters_are_split_from_the_names():
    """Those in the name replace those of the config, which hold for all methods."""
    (_, config), *_ = find(
        saliencies=["ria:power=1.0"],
        topups=["owl:half_width=0.1"],
        config={"topup_args": {"half_width": 0.2, "outlier_factor": 7}},
    )
    assert (config.saliency, config.saliency_args) == ("ria", {"power": 1.0})
    assert (config.topup, config.topup_args) == ("owl", {"half_width": 0.1, "outlier_factor": 7})


def test_an_impossible_combination_says_how_to_leave_it_out():
    pair = {"saliencies": ["wanda", "sparsegpt:variant=authors"], "topups": ["uniform", "dsnot"]}
    left_out = r"^sparsegpt:.* \+ dsnot, 50% sparsity: .*without=\['sparsegpt\+dsnot'\], --without sparsegpt\+dsnot\.$"
    with pytest.raises(ValueError, match=left_out):
        find(**pair)
    assert len(find(**pair, without=["sparsegpt+dsnot"])) == 3
    spelled = find(
        topups=["alpha-pruning", "owl:half_width=0.1"], without=["wanda+alpha_pruning", "wanda+owl"], presets=["fast"]
    )
    assert [result.topup for result, _ in spelled] == ["fast (alps + uniform)"], "however they are spelled"
    with pytest.raises(ValueError, match="preset paper, 50% sparsity: .*does not update weights") as error:
        find(topups=[], presets=["paper"], config={"refit_epochs": 2})
    assert "without" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"saliencies": ["wandq"]}, ValueError, "Did you mean 'wanda'"),
        ({"topups": ["uniforn:x=1"]}, ValueError, "Did you mean 'uniform'"),
        ({"topups": []}, ValueError, "nothing to compare"),
        ({"sparsities": [1.5]}, ValueError, "sparsities is 1.5"),
        ({"sparsities": 0.5}, TypeError, "sparsities is 0.5: expected a list"),
        ({"config": {"topup": "owl"}}, ValueError, "topup is 'owl': give a list as topups"),
        ({"without": ["magnitude+owk"]}, ValueError, "Did you mean 'owl'"),
        ({"saliencies": "wanda"}, TypeError, "saliencies is .wanda.: expected a list"),
        ({"config": {"num_smaples": 3}}, ValueError, "Did you mean 'num_samples'"),
        ({"sweep": {"seed": [], "num_samples": [8]}}, ValueError, "sweep has no values of seed"),
    ],
)
def test_mistakes(changes, error, message):
    with pytest.raises(error, match=message):
        find(**changes)


def test_numpy_values_and_a_seed_that_is_named_twice():
    found = find(sweep={"seed": np.array([0, 0, 1])}, sparsities=np.array([0.5], dtype=np.float32))
    assert [asdict(result)["setting"] for result, _ in found] == [{"seed": 0}, {"seed": 1}]
    assert json.dumps([asdict(result) for result, _ in found])


def test_titles_name_variants_and_steps_and_one_of_two_spellings_is_run():
    topups = ["neuronal", "neuronal:variant=sequence", "neuronal:variant=authors", "owl:half_width=0.1"]
    found = find(saliencies=["sparsegpt:variant=authors"], topups=topups, presets=["paper"])
    assert [(result.saliency, result.topup) for result, _ in found] == [
        ("sparsegpt, authors", "neuronal, sequence, block step"),
        ("sparsegpt, authors", "neuronal, authors, block and row steps"),
        ("sparsegpt, authors", "owl, half_width=0.1"),
        ("preset", "paper (wanda + neuronal, authors, block and row steps)"),
    ]
