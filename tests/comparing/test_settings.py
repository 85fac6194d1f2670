import pytest

from optimum_neuronal.comparing.results import Result
from optimum_neuronal.comparing.settings import ComparisonSettings, make_config


GIVEN = {"saliencies": ["wanda"], "topups": ["uniform"], "sparsities": [0.5], "dataset": [[1, 2]], "evaluate": {}}


def settings(**changes):
    return ComparisonSettings(**GIVEN | changes)


def test_a_combination_occurs_once():
    found = settings(saliencies=["wanda", "wanda"], sparsities=(0.5, 0.6, 0.5), evaluate={"own": [[1, 2]]})
    expected = [Result(sparsity, "wanda", "uniform") for sparsity in (0.5, 0.6)]
    assert [result for result, _ in found.combinations] == expected and len(found.possible) == 2


def test_bits_are_a_dimension():
    found = settings(sparsities=[0.5, 0.6], value_bits=iter([None, 4])).combinations
    assert [(key.sparsity, key.value_bits) for key, _ in found] == [(0.5, None), (0.5, 4), (0.6, None), (0.6, 4)]
    assert all(config.value_bits == key.value_bits for key, config in found)
    for one in (3, None):
        assert [key.value_bits for key, _ in settings(value_bits=one).combinations] == [one]


def test_mistakes():
    for changes, error, message in (
        ({"value_bits": [4, 5]}, ValueError, "value_bits is 5: expected one of 8, 4, 3, 2, or None"),
        ({"value_bits": True}, TypeError, "value_bits is True"),
        ({"value_bits": ["4"]}, TypeError, "value_bits is '4'"),
        ({"value_bits": "4"}, TypeError, "value_bits is '4': expected several, such as .None, 4, 3."),
        ({"value_bits": []}, ValueError, "nothing to compare"),
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
