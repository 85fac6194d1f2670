"""Refit with values of few bits: what comes out can be coded, and loses less than rounding at the end."""

import pytest
import torch
from conftest import make_model
from sweeps import build_sweep, state, unchanged

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.engine.calls import Stream
from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.statistics import Hessian
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import trial_weights
from optimum_neuronal.pruning.refit import Refit, fit_and_round
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.sparsity.masks import NewWeight


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids of 16 sequences: two batches, the second of which is held out."""
    return torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))


def half(projection) -> torch.Tensor:
    kept = torch.rand(projection.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    return torch.where(kept, projection.weight, 0)


class Fitted:
    """A block that was pruned by half at random places, fitted, and rounded on the way, or at the end."""

    def __init__(self, family, ids, bits, epochs=4, rate=0.1):
        self.model = make_model(family)
        self.before = state(self.model)
        with inference(self.model):
            self.engine = build_sweep(find_decoder(self.model), SparseGPT(), ids, len(ids), 8).engine
            inputs = self.engine.alignment_inputs()
            self.block, self.calls = self.engine.decoder.blocks[0], inputs.calls[0]
            self.inputs = Stream(inputs.hidden)
            self.expected = self.engine.runner.output(self.block, self.inputs, self.calls)
            self.sparse = {p.name: NewWeight(half(p)) for p in self.block.pruned}
            self.refit = Refit(epochs, rate)
            self.engine = self.engine.with_value_bits(bits)
            self.found = fit_and_round(
                self.engine, self.refit, self.block, self.sparse, self.inputs, self.expected, self.calls
            )

    def error(self, weights) -> float:
        """Mean squared error of the block's output."""
        with inference(self.model), trial_weights(self.block.pruned, lambda p: NewWeight(weights[p.name])):
            output = self.engine.runner.output(self.block, self.inputs, self.calls)
        pairs = zip(output.batches, self.expected.batches)
        return float(sum((own - expected).square().mean() for own, expected in pairs))

    def rounded_at_the_end(self) -> dict[str, torch.Tensor]:
        with inference(self.model):
            fitted = self.refit.fit(self.block, self.sparse, self.inputs, self.expected, self.calls)
            with trial_weights(self.block.pruned, lambda p: NewWeight(fitted[p.name])):
                _, norms = self.engine.runner.replay(self.block, self.inputs, self.calls, Hessian)
            activations, _ = self.engine.applier.activations(self.block, norms)
            return self.engine.applier.rounded(self.block.pruned, fitted, activations, norms)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_values_have_codes_and_zeros_stay(family, ids):
    fitted = Fitted(family, ids, 3, epochs=1)
    assert set(fitted.found) == set(fitted.sparse)
    for name, weight in fitted.found.items():
        assert torch.equal(weight != 0, fitted.sparse[name].weight != 0), name
        assert CodedWeight.exact(weight, 3) is not None, name
    assert unchanged(fitted.model, fitted.before)


def test_it_loses_less_than_rounding_at_the_end(ids):
    fitted = Fitted("llama", ids, 2)
    assert fitted.error(fitted.found) < 0.97 * fitted.error(fitted.rounded_at_the_end())


def test_epochs_are_all_counted(ids, monkeypatch):
    taken, original = [], Refit.fit

    def fit(self, *args):
        taken.append((self.epochs, self.learning_rate))
        return original(self, *args)

    monkeypatch.setattr(Refit, "fit", fit)
    Fitted("llama", ids, 3, epochs=2, rate=0.04)
    assert taken == [(2, 0.04)] + 3 * [(1, 0.02)]


@pytest.mark.parametrize("reconstruct", ["dense", "block"])
def test_a_prune_with_refit_leaves_nothing_to_be_rounded(reconstruct, ids):
    model = make_model("llama", num_hidden_layers=1)
    fields = {"num_samples": 16, "num_alignment_samples": 4, "refit_epochs": 1, "reconstruct": reconstruct}
    pruner = NeuronALPruner(NeuronALConfig(0.5, saliency="alps", topup="uniform", value_bits=3, **fields))
    pruner.prune(model, ids)
    assert not pruner.report.roundings
    assert all(CodedWeight.exact(p.weight, 3) is not None for p in find_decoder(model).projections.values())
