"""Streams of hidden states over the alignment sequences: the dense model's, and a plan's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ..blocks.block_inputs import Call, Stream, Streams
from ..blocks.statistics import Norms, SquaredNorms
from ..model.projections import Block, trial_weights
from ..saliency.plan import SparsityPlan


if TYPE_CHECKING:
    from .trials import Trials


@dataclass(frozen=True)
class DenseStream:
    """The dense model's pass over the alignment sequences."""

    norms: list[Norms]  # of the inputs of every block's projections
    final: SquaredNorms  # of the last block's output behind the final norm
    output: Stream  # of the last block


def run_dense(trials: "Trials", statistic: type[SquaredNorms]) -> DenseStream:
    """Run the dense model, and measure a statistic of every projection's input."""
    per_block: list[Norms] = []

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = trials.runner.replay(block, streams[0], calls, statistic)
        per_block.append(norms)
        return [output]

    inputs = trials.alignment_inputs()
    (output,) = trials.runner.run(inputs, 1, visit, "Dense activations")
    return DenseStream(per_block, final_norms(inputs.final_norm, output), output)


def run_plan(trials: "Trials", plan: SparsityPlan) -> tuple[list[Norms], Stream]:
    """Run a plan's blocks, pruned by score alone: see [`Trials.stream_of`]."""
    per_block: list[Norms] = []

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        per_block.append(trials.runner.inputs_of(block, streams[0], calls))
        (change_of,) = trials.changes(block, per_block[-1], [plan], updates=False)
        with trial_weights(block.pruned, change_of):
            return [trials.runner.output(block, streams[0], calls)]

    (output,) = trials.runner.run(trials.alignment_inputs(), 1, visit)
    return per_block, output


def final_norms(final_norm: nn.Module | None, stream: Stream) -> SquaredNorms:
    """Return the squared norms of the last block's output after the final norm."""
    norms = SquaredNorms()
    for states in stream:
        norms.update(states if final_norm is None else final_norm(states), len(states))
    return norms
