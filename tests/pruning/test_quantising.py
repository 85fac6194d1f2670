import pytest
import torch
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.quantising import check_dtypes, round_changes
from optimum_neuronal.sparsity.masks import Zeros


def changes_of(decoder, sparsity=0.6):
    generator = torch.Generator().manual_seed(0)
    return {
        name: Zeros(torch.rand(projection.shape, generator=generator) >= sparsity)
        for name, projection in decoder.projections.items()
    }


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("bits", [4, 8])
def test_kept_values_are_rounded_along_the_inputs_and_the_zeros_stay(family, bits):
    decoder = find_decoder(make_model(family))
    before = {name: projection.weight.clone() for name, projection in decoder.projections.items()}
    changes = changes_of(decoder)
    rounded, roundings = round_changes(decoder, changes, bits)
    assert rounded.keys() == roundings.keys() == decoder.projections.keys()
    for name, projection in decoder.projections.items():
        weight = rounded[name].applied(projection.weight)
        assert torch.equal(projection.weight, before[name]), "no weight is changed yet"
        assert torch.equal(weight != 0, changes[name].applied(projection.weight) != 0)
        assert CodedWeight.exact(weight, bits) is not None
        sparse = changes[name].applied(projection.weight)
        error = float((weight - sparse).square().sum() / sparse.square().sum())
        assert roundings[name].error == pytest.approx(error, rel=1e-3)
        assert 0 < error < {4: 0.02, 8: 1e-4}[bits]


def test_what_is_rounded_already_stays_as_it_is():
    decoder = find_decoder(make_model("llama"))
    once, before = round_changes(decoder, changes_of(decoder), 3)
    twice, roundings = round_changes(decoder, once, 3)
    assert roundings == before, "against the dense weights"
    for name, projection in decoder.projections.items():
        assert torch.equal(once[name].applied(projection.weight), twice[name].applied(projection.weight))


def test_outliers_that_are_clipped_are_counted():
    decoder = find_decoder(make_model("llama"))
    name, projection = next(iter(decoder.projections.items()))
    with torch.no_grad():
        projection.weight.fill_(0.01)
        projection.weight[0, 0] = 0.08  # so far off that no table has levels for both
    _, roundings = round_changes(
        decoder, {n: Zeros(torch.ones(p.shape, dtype=torch.bool)) for n, p in decoder.projections.items()}, 2
    )
    assert roundings[name].clipped == 1


def test_a_dtype_of_which_no_codes_are_made_is_refused_before_any_work():
    model = make_model("llama").double()
    with pytest.raises(ValueError, match="q_proj has the dtype torch.float64: with value_bits, expected one of"):
        check_dtypes(find_decoder(model).projections.values())
    config = NeuronALConfig(0.5, saliency="magnitude", topup="uniform", value_bits=4)
    with pytest.raises(ValueError, match="with value_bits, expected one of"):
        NeuronALPruner(config).prune(model)
    assert all((p.weight != 0).all() for p in find_decoder(model).projections.values())
