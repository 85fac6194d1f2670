import pytest

from optimum_neuronal.comparing.asked import Combination, check_asked, make_config


def test_a_combination_is_asked_for_once():
    given = {"saliencies": ["wanda", "wanda"], "topups": ["uniform"], "sparsities": (0.5, 0.6, 0.5)}
    found = check_asked(**given, dataset=[[1, 2]], evaluate={"own": [[1, 2]]}, config={})
    expected = [Combination(sparsity, "wanda", "uniform") for sparsity in (0.5, 0.6)]
    assert list(found.configs) == list(found.possible) == expected


def test_bits_are_a_dimension():
    given = {"saliencies": ["wanda"], "topups": ["uniform"], "dataset": [[1, 2]], "evaluate": {}, "config": {}}
    found = check_asked(**given, sparsities=[0.5, 0.6], value_bits=iter([None, 4])).configs
    assert [(key.sparsity, key.value_bits) for key in found] == [(0.5, None), (0.5, 4), (0.6, None), (0.6, 4)]
    assert all(config.value_bits == key.value_bits for key, config in found.items())
    for one in (3, None):
        assert [key.value_bits for key in check_asked(**given, sparsities=[0.5], value_bits=one).configs] == [one]


@pytest.mark.parametrize(
    "value_bits, error, message",
    [
        ([4, 5], ValueError, "value_bits holds 5: expected 8, 4, 3, 2, or None"),
        (True, ValueError, "value_bits holds True"),
        (["4"], ValueError, "value_bits holds '4'"),
        ("4", TypeError, "value_bits is '4': expected several, such as .None, 4, 3."),
        ([], ValueError, "nothing to compare"),
    ],
)
def test_bits_that_values_cannot_have(value_bits, error, message):
    given = {"saliencies": ["wanda"], "topups": ["uniform"], "sparsities": [0.5], "dataset": [[1, 2]]}
    with pytest.raises(error, match=message):
        check_asked(**given, evaluate={}, config={}, value_bits=value_bits)


def test_a_shared_hyper_parameter_name_goes_to_the_config_for_every_method(own_topup):
    others = {"seed": 7, "batch_size": 2, "block_lambdas": (0.1,)}
    for topup in ("uniform", "neuronal", "search", "test-only:seed=5"):
        config = make_config(Combination(0.7, "wanda", topup), "c4", others)
        assert (config.seed, config.batch_size) == (7, 2)
    assert config.make_methods().topup == own_topup(seed=5)


def test_compare_gives_aliases_to_their_topups_beneath_what_a_method_says_itself():
    others = {"block_lambdas": (0.1,), "reference": "dense"}
    own = make_config(Combination(0.7, "wanda", "neuronal:block_lambdas=[0.2]"), "c4", others)
    assert own.topup_args == {"block_lambdas": [0.2], "reference": "dense"}
    assert make_config(Combination(0.7, "wanda", "search"), "c4", others).topup_args == {}
    assert make_config(Combination(0.7, "sparsegpt", "neuronal"), "c4", {}).topup_args == {"steps": "block"}
    with pytest.raises(ValueError, match="updates all rows"):
        make_config(Combination(0.7, "sparsegpt", "neuronal"), "c4", {"steps": "both"})


@pytest.mark.parametrize(
    "options, message",
    [({"limit": 0}, "limit is 0: expected a whole number"), ({"include_path": "absent"}, "'absent' is not a folder")],
)
def test_what_tasks_are_asked_with_is_checked_without_a_model(options, message):
    given = {"saliencies": ["wanda"], "topups": ["uniform"], "sparsities": [0.5], "dataset": [[1, 2]], "config": {}}
    with pytest.raises(ValueError, match=message):
        check_asked(**given, evaluate={}, tasks=["boolq"], **options)


def test_a_head_is_not_compared():
    given = {"saliencies": ["wanda"], "topups": ["uniform"], "sparsities": [0.5], "dataset": [[1, 2]], "evaluate": {}}
    with pytest.raises(ValueError, match="rounds no head: leave embedding_bits out"):
        check_asked(**given, config={"embedding_bits": 8, "format": "packed"})
