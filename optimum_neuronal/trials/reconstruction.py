"""The reconstruction error of plans (paper, appendix "Comparison with Reconstruction Error-Based Pruning")."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..blocks.block_inputs import Call, Streams, grouped
from ..blocks.statistics import Hessian, Norms, most_specific
from ..model.projections import Block, ChangeOf, trial_weights
from ..saliency.plan import SparsityPlan


if TYPE_CHECKING:
    from .trials import Trials


def reconstruction_errors(
    trials: "Trials", plans: Sequence[SparsityPlan], reference: str, label: str | None
) -> list[float]:
    """Measure [`Trials.reconstruction_errors`] as `sum((D H) * D)`, with `D = W - M * W` and the Hessian `H = X X^T`."""
    errors: list[list[torch.Tensor]] = [[] for _ in plans]
    runner, last = trials.runner, len(trials.decoder.blocks) - 1
    statistic = most_specific(Hessian, trials.saliency.statistic)

    def compare(block: Block, norms: Norms, members: Sequence[int]) -> list[ChangeOf]:
        changes = trials.changes(block, norms, [plans[member] for member in members])
        for member, change_of in zip(members, changes):
            errors[member].append(_block_error(block, norms, change_of))
        return changes

    def visit_dense(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = runner.replay(block, streams[0], calls, statistic)
        compare(block, norms, range(len(plans)))
        return [output]

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        outputs = list(streams)
        for members in grouped(streams, shared=False):
            norms = runner.inputs_of(block, streams[members[0]], calls, statistic)
            changes = compare(block, norms, members)
            if index < last:  # the last block's outputs are not needed
                for member, change_of in zip(members, changes):
                    with trial_weights(block.pruned, change_of):
                        outputs[member] = runner.output(block, streams[member], calls)
        return outputs

    dense = reference == "dense"
    runner.run(trials.alignment_inputs(), 1 if dense else len(plans), visit_dense if dense else visit, label)
    return [runner.total(per_block) for per_block in errors]


def _block_error(block: Block, norms: Norms, change_of: ChangeOf) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for projection in block.pruned:
        lost = projection.weight.float() - change_of(projection).applied(projection.weight).float()
        total += ((lost @ norms[projection.name].hessian) * lost).sum(dim=1).cpu().double().sum()
    return total
