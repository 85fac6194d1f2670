"""The question that allocations by block ask: what a function tells of every block of the dense model."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..engine.calls import Call
from ..engine.passes import CalibrationPass, Runs
from ..engine.statistics import SquaredNorms
from ..engine.streams import Streams
from ..model.projections import Block
from .engine import Engine


Score = Callable[[Block, dict[str, Tensor]], list[float]]


class ScoresPass(CalibrationPass):
    """What [`dense_scores`] costs."""

    def runs(self, index: int, last: int) -> Runs:
        return 1, 0, 0


def dense_scores(engine: Engine, score: Score, label: str) -> list[list[float]]:
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
