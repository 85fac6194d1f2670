"""A block that is fitted again."""

import torch
from conftest import make_model
from trial_helpers import build_evaluator, state

from optimum_neuronal.blocks.block_inputs import Stream
from optimum_neuronal.blocks.runner import replay
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.change import NewWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import trial_weights
from optimum_neuronal.pruning.refit import Refit
from optimum_neuronal.saliency.plan import Plan
from optimum_neuronal.saliency.sparsegpt import SparseGPT


class Fitted:
    """A block, half of whose weights were pruned at random, and its weights after a refit.

    `plan` is a larger sparsity that the refit reaches, or a function of a projection's place and shape that returns it.
    """

    def __init__(self, family, ids, epochs=4, rate=0.2, dtype=torch.float32, plan=None):
        self.model, self.refit = make_model(family), Refit(epochs, rate, dtype)
        self.before = state(self.model)
        with inference(self.model):
            evaluator = build_evaluator(find_decoder(self.model), SparseGPT(), ids, len(ids))
            inputs, self.runner = evaluator.alignment_inputs(), evaluator.runner
            self.block, self.inputs, self.calls = evaluator.decoder.blocks[0], Stream(inputs.hidden), inputs.calls[0]
            self.expected = self.runner.output(self.block, self.inputs, self.calls)
            self.sparse = {p.name: self.half(p) for p in self.block.pruned}
            of_place = plan if callable(plan) else lambda place, shape: plan
            sparsities = {p.name: of_place(place, p.shape) for place, p in enumerate(self.block.pruned)}
            self.plan = None if plan is None else Plan(sparsities)
            fitted = self.refit.fit(*self.given(), self.plan)
            self.weights = {name: change.weight for name, change in fitted.items()}

    @staticmethod
    def half(projection) -> torch.Tensor:
        kept = torch.rand(projection.shape, generator=torch.Generator().manual_seed(3)) < 0.5
        return torch.where(kept, projection.weight, 0)

    def given(self):
        changes = {name: NewWeight(weight) for name, weight in self.sparse.items()}
        norms = replay(self.block, self.inputs.batches, self.calls)[1]
        return self.block, changes, norms, self.inputs, self.expected, self.calls

    def zeros(self, name) -> int:
        return int((self.weights[name] == 0).sum())

    def held_out_error(self, weights) -> float:
        """Mean squared error of the block's output on the last batch."""
        with inference(self.model), trial_weights(self.block.pruned, lambda p: NewWeight(weights[p.name])):
            output = self.runner.output(self.block, self.inputs, self.calls)
        return float((output.batches[-1] - self.expected.batches[-1]).square().mean())
