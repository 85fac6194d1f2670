import pytest

from optimum_neuronal import NeuronALConfig


def test_a_budget_takes_the_place_of_a_sparsity():
    config = NeuronALConfig(bits_per_weight=2.4)
    assert (config.sparsity, config.value_bits, config.bits_per_weight) == (None, None, 2.4)
    assert NeuronALConfig.from_dict(config.to_dict()) == config
    assert NeuronALConfig(bits_per_weight=2.4, effort="best").refit_epochs == 0, "as with value_bits"
    with pytest.raises(TypeError, match="needs a sparsity, such as 0.7, or bits, such as bits_per_weight"):
        NeuronALConfig()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"bits_per_weight": "2.4"}, TypeError, "bits_per_weight is '2.4': expected a number"),
        ({"bits_per_weight": True}, TypeError, "bits_per_weight is True: expected a number"),
        (
            {"bits_per_weight": 1.0625},
            ValueError,
            "bits_per_weight is 1.0625: expected more than 1.0625, which masks and scales alone take",
        ),
        ({"bits_per_weight": 10}, ValueError, "at most 9.0625"),
        ({"bits_per_weight": float("nan")}, ValueError, "bits_per_weight is nan"),
        (
            {"bits_per_weight": 2.4, "sparsity": 0.6, "value_bits": 3},
            ValueError,
            "two of them decide the third: leave one out",
        ),
        (
            {"bits_per_weight": 2.4, "pattern": "2:4"},
            ValueError,
            "The pattern 2:4 decides the sparsity: give sparsity too",
        ),
        (
            {"bits_per_weight": 2.4, "saliency": "magnitude", "topup": "uniform"},
            ValueError,
            "looks at none: give value_bits too",
        ),
        ({"bits_per_weight": 2.4, "value_bits": 5}, ValueError, "value_bits is 5: expected one of 8, 4, 3, 2"),
    ],
    ids=str,
)
def test_bad_budgets(fields, error, message):
    with pytest.raises(error, match=message):
        NeuronALConfig(**fields)


def test_what_needs_no_choice_needs_no_calibration():
    own = {"bits_per_weight": 2.4, "saliency": "magnitude", "topup": "uniform"}
    assert NeuronALConfig(**own, value_bits=3).sparsity is None
    assert NeuronALConfig(0.6, **own).value_bits is None
    assert NeuronALConfig(0.5, bits_per_weight=4, pattern="2:4").topup == "uniform"
