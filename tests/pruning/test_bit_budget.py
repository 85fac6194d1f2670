"""What fits into a budget of bits a weight."""

import pytest
from conftest import make_model

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.checkpoint.packed_size import packed_size
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.bit_budget import Pair, likely, pairs_within


@pytest.fixture(scope="module")
def decoder():
    return find_decoder(
        make_model("llama", hidden_size=128, intermediate_size=256)
    )  # whole groups: 0.125 bits of scales


def taken(decoder, sparsity, value_bits):
    return packed_size(decoder, lambda p: int(sparsity * p.numel), value_bits).bits_per_weight


def test_a_weight_takes_its_mask_scales_and_codes(decoder):
    assert taken(decoder, 0.0, 8) == pytest.approx(1 + 0.0625 + 8)
    for sparsity, bits in ((0.6, 4), (0.4, 3), (0.5, 2)):
        assert 0 < taken(decoder, sparsity, bits) - (1.0625 + (1 - sparsity) * bits) < 0.1, "codes fill whole bytes"


@pytest.mark.parametrize("bits", [2.0, 2.4, 3.0, 5.5])
def test_every_pair_fits_and_nothing_less_sparse_does(decoder, bits):
    pairs = pairs_within(decoder, NeuronALConfig(bits_per_weight=bits))
    assert [pair.sparsity for pair in pairs] == sorted({pair.sparsity for pair in pairs})
    assert [pair.value_bits for pair in pairs] == sorted(pair.value_bits for pair in pairs)
    for value_bits, sparsity in pairs:
        assert taken(decoder, sparsity, value_bits) <= bits
        assert sparsity == 0 or taken(decoder, sparsity - 1e-4, value_bits) > bits


def test_of_those_without_a_zero_the_one_with_most_bits_stays(decoder):
    assert pairs_within(decoder, NeuronALConfig(bits_per_weight=5.5))[0] == Pair(4, 0.0)


def test_what_is_given_decides_the_rest(decoder):
    config = NeuronALConfig(bits_per_weight=2.4, value_bits=3)
    (pair,) = pairs_within(decoder, config)
    assert pair in pairs_within(decoder, NeuronALConfig(bits_per_weight=2.4)) and pair.value_bits == 3
    assert pair.of(config) == NeuronALConfig(pair.sparsity, value_bits=3)
    for sparsity, expected in ((0.5, 2), (0.6, 3), (0.7, 4), (0.9, 8)):
        assert pairs_within(decoder, NeuronALConfig(sparsity, bits_per_weight=2.4))[0] == Pair(expected, sparsity), (
            sparsity
        )


def test_a_choice_stays_open_and_costs_are_told_of_what_is_likely(decoder):
    config, plain = NeuronALConfig(bits_per_weight=2.4), NeuronALConfig(0.7)
    assert likely(plain, []) is plain
    assert pairs_within(decoder, plain) == []
    found = likely(config, pairs_within(decoder, config))
    assert found.value_bits == 3 and found.bits_per_weight is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"bits_per_weight": 1.2},
            "bits_per_weight is 1.2, but 95.00% sparsity with values of 2 bits takes 1.2.. bits a weight in this model",
        ),
        (
            {"bits_per_weight": 2.0, "sparsity": 0.5},
            "50.00% sparsity with values of 2 bits takes 2.1.. .*, or more sparsity",
        ),
        ({"bits_per_weight": 1.4, "value_bits": 8}, "95.00% sparsity with values of 8 bits takes 1.463"),
    ],
)
def test_what_does_not_fit_is_told(decoder, fields, message):
    with pytest.raises(ValueError, match=message):
        pairs_within(decoder, NeuronALConfig(**fields))
