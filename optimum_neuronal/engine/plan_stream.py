"""The stream of a plan: what the dense blocks receive behind the plan's sparse blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..decoder.projections import Block
from ..decoder.trial import trial_weights
from ..metrics.statistics import Norms
from ..sparsity.plan import SparsityPlan
from .calls import Call
from .streams import Stream, Streams


if TYPE_CHECKING:
    from .engine import Engine


class PlanStream:
    """Keeps the stream of the last plan that was asked for."""

    def __init__(self):
        self._last: tuple[SparsityPlan, list[Norms], Stream] | None = None

    def get(self, engine: "Engine", plan: SparsityPlan) -> tuple[list[Norms], Stream]:
        """Runs the plan's stream over the alignment sequences, pruning by score alone, unless it was the last one.

        Returns:
            `tuple`: squared norms of what every dense block's projections receive, and the last sparse block's output.
        """
        if self._last is None or self._last[0] is not plan:
            self._last = plan, *_run(engine, plan)
        return self._last[1:]

    def release(self) -> None:
        """Lets go of the last one."""
        self._last = None


def _run(engine: "Engine", plan: SparsityPlan) -> tuple[list[Norms], Stream]:
    runner, applier = engine.runner, engine.applier
    per_block: list[Norms] = []

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        per_block.append(runner.inputs_of(block, streams[0], calls))
        (change_of,) = applier.changes(block, per_block[-1], [plan], updates=False)
        with trial_weights(block.pruned, change_of):
            return [runner.output(block, streams[0], calls)]

    (output,) = runner.run(engine.alignment_inputs(), 1, visit)
    return per_block, output


def row_saliency(engine: "Engine", plan: SparsityPlan, label: str | None) -> dict:
    """Sum of the saliency of every row's weights, measured on a plan's own stream.

    Returns:
        `dict[str, Tensor]`: projection name -> float64 on the CPU, shape (out,).
    """

    def measure(_) -> tuple[None, dict]:
        rows = {}
        norms, _ = engine.plan_stream.get(engine, plan)
        for index in range(len(engine.decoder.blocks)):
            with engine.runner.loader.loaded(index) as block:
                activations, _ = engine.applier.activations(block, norms[index])
                for projection in block.pruned:
                    score = engine.applier.score(projection, activations)
                    rows[projection.name] = score.double().sum(dim=1).cpu()
        return None, rows

    return engine.processes.from_first(engine.records.once([plan], ("row saliency", label), measure))[1]
