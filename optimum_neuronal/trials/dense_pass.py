"""The dense model's own stream over the alignment sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..engine.calls import Call
from ..engine.capture import BlockInputs
from ..engine.passes import Pass, Runs
from ..engine.runner import BlockRunner
from ..engine.statistics import Norms, SquaredNorms
from ..engine.streams import Stream, Streams
from ..model.projections import Block


@dataclass(frozen=True)
class DenseStream:
    """What the dense model does with the alignment sequences.

    Args:
        norms (`list[Mapping[str, SquaredNorms]]`): inputs of every block's projections.
        final ([`SquaredNorms`]): the last block's output as the final norm leaves it.
        output ([`Stream`]): the last block's output.
    """

    norms: list[Norms]
    final: SquaredNorms
    output: Stream


class DensePass(Pass):
    """What [`dense_stream`] costs."""

    @property
    def needs_dense(self) -> bool:
        return False

    def runs(self, index: int, last: int) -> Runs:
        return 1, 0, 0

    def hidden_sequences(self, samples: int, alignment: int, deep: bool) -> int:
        return 0  # what needs it counts it


def dense_stream(runner: BlockRunner, inputs: BlockInputs, statistic: type[SquaredNorms]) -> DenseStream:
    """One pass of the dense model, gathering a statistic of all inputs.

    Args:
        runner ([`BlockRunner`]): runs the blocks.
        inputs ([`BlockInputs`]): what they are called with for the alignment sequences.
        statistic (`type[SquaredNorms]`): what is gathered.
    """
    per_block: list[Norms] = []

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = runner.replay(block, streams[0], calls, statistic)
        per_block.append(norms)
        return [output]

    (output,) = runner.run(inputs, 1, visit, "Dense activations")
    return DenseStream(per_block, final_norms(inputs.final_norm, output), output)


def final_norms(final_norm: nn.Module | None, stream: Stream) -> SquaredNorms:
    """Squared norms of the last block's output as the final norm leaves it."""
    norms = SquaredNorms()
    for states in stream:
        norms.update(states if final_norm is None else final_norm(states), len(states))
    return norms
