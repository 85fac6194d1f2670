"""Refit with values of few bits: what comes out can be coded, and loses less than rounding at the end."""

import pytest
import torch
from conftest import make_model
from sweeps import unchanged

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.refit import Refit

from .fitted import Fitted


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids of 16 sequences: two batches, the second of which is held out."""
    return torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_values_have_codes_and_zeros_stay(family, ids):
    fitted = Fitted(family, ids, epochs=1, rate=0.1, bits=3)
    assert set(fitted.found) == set(fitted.sparse)
    for name, weight in fitted.found.items():
        assert torch.equal(weight != 0, fitted.sparse[name] != 0), name
        assert CodedWeight.exact(weight, 3) is not None, name
    assert unchanged(fitted.model, fitted.before)


def test_it_loses_less_than_rounding_at_the_end(ids):
    fitted = Fitted("llama", ids, rate=0.1, bits=2)
    assert fitted.error(fitted.found) < 0.97 * fitted.error(fitted.rounded_at_the_end())


def test_epochs_are_all_counted(ids, monkeypatch):
    taken, original = [], Refit.fit

    def fit(self, *args):
        taken.append((self.epochs, self.learning_rate))
        return original(self, *args)

    monkeypatch.setattr(Refit, "fit", fit)
    Fitted("llama", ids, epochs=2, rate=0.04, bits=3)
    assert taken == [(2, 0.04)] + 3 * [(1, 0.02)]


@pytest.mark.parametrize("reconstruct", ["dense", "block"])
def test_a_prune_with_refit_leaves_nothing_to_be_rounded(reconstruct, ids):
    model = make_model("llama", num_hidden_layers=1)
    fields = {"num_samples": 16, "num_alignment_samples": 4, "refit_epochs": 1, "reconstruct": reconstruct}
    pruner = NeuronALPruner(NeuronALConfig(0.5, saliency="alps", topup="uniform", value_bits=3, **fields))
    pruner.prune(model, ids)
    assert not pruner.report.roundings
    assert all(CodedWeight.exact(p.weight, 3) is not None for p in find_decoder(model).projections.values())
