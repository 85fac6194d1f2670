"""The stream of a plan: what the dense blocks receive behind the plan's sparse blocks."""

from collections.abc import Sequence

from ..engine.calls import Call
from ..engine.capture import BlockInputs
from ..engine.runner import BlockRunner
from ..engine.statistics import Norms
from ..engine.streams import Stream, Streams
from ..model.projections import Block
from ..model.trial import trial_weights
from ..sparsity.plan import SparsityPlan
from .applier import PlanApplier


class PlanStream:
    """Keeps the stream of the last plan that was asked for."""

    def __init__(self):
        self._last: tuple[SparsityPlan, list[Norms], Stream] | None = None

    def get(
        self, plan: SparsityPlan, runner: BlockRunner, applier: PlanApplier, inputs: BlockInputs
    ) -> tuple[list[Norms], Stream]:
        """Runs the plan's stream, pruning by score alone, unless it was the last one.

        Args:
            plan ([`SparsityPlan`]): whose stream is wanted.
            runner ([`BlockRunner`]), applier ([`PlanApplier`]): run the blocks, and make them sparse.
            inputs ([`BlockInputs`]): what the blocks are called with for the alignment sequences.

        Returns:
            `tuple`: squared norms of what every dense block's projections receive, and the last sparse block's output.
        """
        if self._last is None or self._last[0] is not plan:
            self._last = plan, *_run(plan, runner, applier, inputs)
        return self._last[1:]

    def release(self) -> None:
        """Lets go of the last one."""
        self._last = None


def _run(
    plan: SparsityPlan, runner: BlockRunner, applier: PlanApplier, inputs: BlockInputs
) -> tuple[list[Norms], Stream]:
    per_block: list[Norms] = []

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        per_block.append(runner.inputs_of(block, streams[0], calls))
        (change_of,) = applier.changes(block, per_block[-1], [plan], updates=False)
        with trial_weights(block.pruned, change_of):
            return [runner.output(block, streams[0], calls)]

    (output,) = runner.run(inputs, 1, visit)
    return per_block, output
