"""Weights solved at a few sparsities: what is between them, where they lie, and what they cost."""

import torch
from sweeps import build_sweep, uniform

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.trials.solved import SolvedSparsities


FAST = ALPS(iterations=6)


class Solved:
    """A model with its levels at hand."""

    def __init__(self, model, ids, saliency=FAST, batch_size=4, **options):
        self.model = model
        self.sweep = build_sweep(find_decoder(model), saliency, ids, 4, batch_size, **options)
        with inference(model):
            self.levels = self.sweep.solve(SolvedSparsities.around(0.6))

    def weight(self, projection, sparsity):
        """What a trial of a sparsity computes with."""
        index = next(i for i, block in enumerate(self.sweep.decoder.blocks) if projection.name in block.projections)
        (change_of,) = self.levels.changes(index, [uniform(self.sweep, sparsity)])
        return change_of(projection).applied(projection.weight)

    def all_weights(self, sparsity) -> dict[str, torch.Tensor]:
        return {name: self.weight(p, sparsity) for name, p in self.sweep.decoder.projections.items()}
