"""Refit with values of few bits in the end: projections are rounded one after the other, and those still free make up for it.

Gradients straight through the rounding, which are the usual way, end at more error here: docs/few_bits.md has both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..engine.calls import Call
from ..engine.paired_inputs import STAGES, stages
from ..engine.statistics import Hessian, Norms
from ..engine.streams import Stream
from ..model.projections import Block
from ..model.trial import Prepared
from ..sparsity.changes import Change, NewWeight
from ..trials.engine import Engine
from .refit import RUNS, Refit


AGAIN = 0.25  # of the epochs, and half of the rate, after each stage that was rounded


def all_epochs(epochs: int) -> int:
    """Epochs in all, for a block of four stages."""
    return epochs + (STAGES - 1) * _epochs_again(epochs)


def _epochs_again(epochs: int) -> int:
    return math.ceil(epochs * AGAIN)


class RoundedRefit:
    """Fits and rounds the kept weights of blocks.

    Args:
        engine ([`Engine`]): runs the blocks, and rounds to the `value_bits` of its applier.
        refit ([`Refit`]): how weights are fitted.
    """

    def __init__(self, engine: Engine, refit: Refit):
        self.engine, self.refit = engine, refit
        self._again = replace(refit, epochs=_epochs_again(refit.epochs), learning_rate=refit.learning_rate / 2)

    def fit(
        self, block: Block, changes: Mapping[str, Change], inputs: Stream, expected: Stream, calls: Sequence[Call]
    ) -> dict[str, torch.Tensor]:
        """Weights with values of few bits. Arguments, and what is returned: see [`Refit.fit`]."""
        runner = self.engine.runner
        weights = self.refit.fit(block, changes, inputs, expected, calls)
        left = stages(runner, block, inputs, calls)
        fixed: list[str] = []
        while left:
            stage = left.pop(0)
            norms = self._inputs(block, weights, inputs, calls)
            activations, _ = self.engine.applier.activations(block, norms, stage)
            weights |= self.engine.applier.rounded(stage, weights, activations, norms)
            fixed += [projection.name for projection in stage]
            if left:
                free = {name: NewWeight(weight) for name, weight in weights.items()}
                weights = self._again.fit(block, free, inputs, expected, calls, fixed)
                runner.block_forwards += RUNS * self._again.epochs * inputs.sequences
        return weights

    def _inputs(
        self, block: Block, weights: Mapping[str, torch.Tensor], inputs: Stream, calls: Sequence[Call]
    ) -> Norms:
        """What the projections receive while the block computes with these weights."""
        with Prepared(block.pruned, lambda p: NewWeight(weights[p.name])).in_place():
            return self.engine.runner.replay(block, inputs, calls, Hessian)[1]
