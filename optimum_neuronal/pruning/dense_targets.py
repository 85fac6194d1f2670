"""The final pruning toward the dense model: every projection makes up for what the sparse ones before it have changed."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ..engine.calls import Call
from ..engine.paired_inputs import STAGES, PairedRuns
from ..engine.passes import Runs
from ..engine.streams import Stream, Streams
from ..formats.bitmask import MASK
from ..model.projections import Block
from ..model.trial import Prepared
from ..trials.records import Finding
from .final_pruning import FinalPruning, PruningPass, stored_change


class DenseTargetsPass(PruningPass):
    """What [`DenseTargets.find`] costs."""

    def runs(self, index: int, last: int) -> Runs:
        # Runs to the inputs of a stage end there and begin behind what is known: half a block for both models. Of experts
        # they are whole ones; the runs to the block's end are less than whole.
        return 2 * int(index < last) + STAGES // 2, 0, 0

    def hidden_sequences(self, samples: int, alignment: int, deep: bool) -> int:
        # Of two streams what goes in and comes out; what parts of the block put out, one in the sparse model, two in the dense.
        return 2 * super().hidden_sequences(samples, alignment, deep) + 2 * samples


class DenseTargets(FinalPruning):
    """Finds what becomes of weights where the saliency updates them; the dense model's stream runs beside the sparse one.

    A block's projections are solved in the order in which they run, each on the inputs that the sparse ones before it
    leave, toward the outputs that it has in the dense model: `min ||W X_dense - V X||^2`, see [`dense_target`].
    """

    streams: ClassVar[int] = 2
    _runs: PairedRuns | None = None  # of the block that was solved last

    def prune_block(self, block: Block, calls: Sequence[Call], streams: Streams) -> Finding:
        self._runs = PairedRuns(self.engine.runner, block, *streams, calls)
        tensors, starved = {}, []
        for stage in self._runs.stages:
            norms = self._runs.inputs(stage, _prepared(block, tensors))
            found, own = self.weights(block, stage, norms)
            starved += found["starved"]
            tensors |= own
        return {"starved": starved}, tensors

    def output(self, index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Stream:
        solved = self._runs is not None and self._runs.block is block  # else it was recorded
        if not solved or (index == 0 and self.refit is not None):  # a refit changes what was solved
            return super().output(index, block, calls, streams)
        return self._runs.output(index)


def _prepared(block: Block, tensors: Mapping[str, torch.Tensor]) -> Prepared:
    """The sparse weights of those of a block's projections that are solved already."""
    done = [p for p in block.pruned if p.name + MASK in tensors]
    return Prepared(done, lambda p: stored_change(p, tensors))
