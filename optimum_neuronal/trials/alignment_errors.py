"""The question that NeuronAL asks: how far a plan would lead the inputs of projections from the dense model's."""

import math
from collections.abc import Sequence

import torch

from ..engine.calls import Call
from ..engine.passes import Pass, Runs
from ..engine.streams import Streams, grouped
from ..engine.unfinished import UnfinishedRun
from ..model.projections import Block
from ..model.trial import trial_weights
from ..sparsity.plan import SparsityPlan
from .alignment import total_error
from .engine import Engine


class AlignmentPass(Pass):
    """What [`alignment_errors`] costs."""

    def runs(self, index: int, last: int) -> Runs:
        dense = 0 if self.reference == "dense" else 1 if index == 0 else self.plans
        return (0, dense + self.plans, 0) if index == last else (self.plans, dense, 0)


def alignment_errors(
    engine: Engine,
    plans: Sequence[SparsityPlan],
    reference: str,
    scope: str,
    metric: str,
    label: str | None,
    bound: float = math.inf,
) -> list[float]:
    """Alignment error of every plan (paper, Eq. 3), all of them in one run.

    Args:
        engine ([`Engine`]): runs the model.
        plans (`Sequence[SparsityPlan]`): what to try; no plan is applied.
        reference (`str`):
            Where dense activations and saliency come from. `"sparse-stream"`: the dense block run on the plan's own
            hidden states. `"dense"`: the dense model's own stream.
        scope, metric (`str`): see [`alignment_error`].
        label (`str`, *optional*): what the progress bar calls the run.
        bound (`float`):
            A plan is abandoned as soon as its error exceeds this: errors add up block by block and never shrink.

    Returns:
        `list[float]`: one error per plan, summed over all pruned projections. Lower is better; infinite for plans that
        were abandoned before the last block.
    """

    def measure(unfinished: UnfinishedRun) -> tuple[list[float], dict]:
        mine = engine.processes.deal(plans)
        errors = _errors(engine, mine, reference, (scope, metric), label, bound, unfinished) if mine else []
        return engine.processes.collect(errors), {}

    return engine.records.once(plans, (reference, scope, metric, label, bound), measure)[0]


def _errors(
    engine: Engine,
    plans: Sequence[SparsityPlan],
    reference: str,
    measured_on: tuple[str, str],
    label: str | None,
    bound: float,
    unfinished: UnfinishedRun,
) -> list[float]:
    runner, blocks, measured = engine.runner, engine.decoder.blocks, unfinished.measured

    def so_far(member: int) -> list[torch.Tensor]:
        return [measured[member, index] for index in range(len(blocks)) if (member, index) in measured]

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        outputs: Streams = [None] * len(plans)  # stays None for those that are abandoned
        unread = runner.output_projections(block) if index == len(blocks) - 1 else ()
        for members in grouped(streams, shared=reference == "dense"):
            norms = engine.reference_norms(reference, index, block, streams[members[0]], calls)
            changes = engine.applier.changes(block, norms, [plans[member] for member in members])
            for member, change_of in zip(members, changes):
                with trial_weights(block.pruned, change_of):
                    output, sparse = runner.replay(block, streams[member], calls, skipped=unread)
                measured[member, index] = total_error(block.pruned, norms, sparse, *measured_on)
                if bound == math.inf or runner.total(so_far(member)) <= bound:
                    outputs[member] = output
        return outputs

    runner.run(engine.alignment_inputs(), len(plans), visit, label, unfinished)
    finished = [(member, len(blocks) - 1) in measured for member in range(len(plans))]
    errors = [runner.total(so_far(member)) for member in range(len(plans))]
    return [error if done else math.inf for error, done in zip(errors, finished)]
