"""The dense model's own stream: what its projections receive, and what a function tells of its blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..decoder.projections import Block
from ..metrics.statistics import Norms, SquaredNorms
from .calls import Call
from .passes import CalibrationPass, Pass, Runs
from .streams import Stream, Streams


if TYPE_CHECKING:
    from .engine import Engine


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


def dense_stream(engine: "Engine", statistic: type[SquaredNorms]) -> DenseStream:
    """One pass of the dense model over the alignment sequences, gathering a statistic of all inputs."""
    per_block: list[Norms] = []

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = engine.runner.replay(block, streams[0], calls, statistic)
        per_block.append(norms)
        return [output]

    inputs = engine.alignment_inputs()
    (output,) = engine.runner.run(inputs, 1, visit, "Dense activations")
    return DenseStream(per_block, final_norms(inputs.final_norm, output), output)


def final_norms(final_norm: nn.Module | None, stream: Stream) -> SquaredNorms:
    """Squared norms of the last block's output as the final norm leaves it."""
    norms = SquaredNorms()
    for states in stream:
        norms.update(states if final_norm is None else final_norm(states), len(states))
    return norms


Score = Callable[[Block, dict[str, Tensor]], list[float]]


class ScoresPass(CalibrationPass):
    """What [`dense_scores`] costs."""

    def runs(self, index: int, last: int) -> Runs:
        return 1, 0, 0


def dense_scores(engine: "Engine", score: Score, label: str) -> list[list[float]]:
    """What a function tells of every dense block: one pass of the dense model over all calibration sequences.

    Args:
        engine ([`Engine`]): runs the model.
        score: a block, with its weights at hand, and the activations of its pruned projections -> numbers.
        label (`str`): what the progress bar calls the pass; it is recorded under that name.

    Returns:
        `list[list[float]]`: block by block.
    """

    def measure() -> tuple[list[list[float]], dict]:
        scores: list[list[float]] = []

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            output, norms = engine.runner.replay(block, streams[0], calls)
            scores.append(score(block, engine.applier.activations(block, engine.joined(norms, SquaredNorms))[0]))
            return [output]

        engine.runner.run(engine.capture_all(SquaredNorms), 1, visit, label, release=True)
        return scores, {}

    name = f"scores-{label.lower().replace(' ', '-')}"
    return engine.kept.get(name, lambda: engine.records.recorded(name, measure)[0])
