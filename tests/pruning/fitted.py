"""A block that is fitted again."""

import torch
from conftest import make_model
from trial_helpers import build_trials, state

from optimum_neuronal.blocks.block_inputs import Stream, inference
from optimum_neuronal.blocks.runner import replay
from optimum_neuronal.model.change import NewWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import trial_weights
from optimum_neuronal.pruning.refit import Refit
from optimum_neuronal.saliency.plan import Plan
from optimum_neuronal.saliency.sparsegpt import SparseGPT


class Fitted:
    """A block that was pruned by half at random places, and fitted. `plan` is a larger sparsity that the refit reaches."""

    def __init__(self, family, ids, epochs=4, rate=0.2, dtype=torch.float32, plan=None, **chosen):
        self.model, self.refit = make_model(family), Refit(epochs, rate, dtype)
        self.before = state(self.model)
        with inference(self.model):
            self.engine = build_trials(find_decoder(self.model, **chosen), SparseGPT(), ids, len(ids))
            inputs = self.engine.alignment_inputs()
            self.block, self.inputs, self.calls = self.engine.decoder.blocks[0], Stream(inputs.hidden), inputs.calls[0]
            self.expected = self.engine.runner.output(self.block, self.inputs, self.calls)
            self.sparse = {p.name: self.half(p) for p in self.block.pruned}
            self.plan = plan and Plan({p.name: plan for p in self.block.pruned})
            self.found = self.refit.fit(*self.given(), self.plan)

    @staticmethod
    def half(projection) -> torch.Tensor:
        kept = torch.rand(projection.shape, generator=torch.Generator().manual_seed(3)) < 0.5
        return torch.where(kept, projection.weight, 0)

    def given(self):
        changes = {name: NewWeight(weight) for name, weight in self.sparse.items()}
        norms = replay(self.block, self.inputs.batches, self.calls)[1]
        energies = {name: norm.value.sum(dim=0) for name, norm in norms.items()}
        return self.block, changes, energies, self.inputs, self.expected, self.calls

    def with_weights(self, weights):
        return trial_weights(self.block.pruned, lambda p: NewWeight(weights[p.name]))

    def error(self, weights, batches=slice(None)) -> float:
        """Mean squared error of the block's output, on all batches or some."""
        with inference(self.model), self.with_weights(weights):
            output = self.engine.runner.output(self.block, self.inputs, self.calls)
        pairs = list(zip(output.batches, self.expected.batches))[batches]
        return float(sum((own - expected).square().mean() for own, expected in pairs))
