"""The reconstruction error of projections (paper, appendix "Comparison with Reconstruction Error-Based Pruning")."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..blocks.block_inputs import Call, Streams, same_streams
from ..blocks.statistics import Hessian, Norms
from ..files.records import Finding
from ..model.projections import Block, ChangeOf, trial_weights
from ..saliency.plan import Plan
from .plan_evaluator import Measurement, PlanEvaluator


@dataclass(frozen=True)
class ReconstructionErrors(Measurement):
    """`sum over projections of || W X - (M * W) X ||_2^2` of every plan over the alignment sequences.

    It is computed as `sum((D H) * D)`, with `D = W - M * W` and the Hessian `H = X X^T`. Arguments: see
    [`AlignmentErrors`].
    """

    shares_plans: ClassVar[bool] = True

    reference: str
    label: str | None = field(default=None, compare=False)

    def measure(self, evaluator: PlanEvaluator, plans: Sequence[Plan]) -> Finding:
        errors: list[list[torch.Tensor]] = [[] for _ in plans]
        runner, last, dense = evaluator.runner, len(evaluator.decoder.blocks) - 1, self.reference == "dense"
        statistic = evaluator.saliency.statistic if issubclass(evaluator.saliency.statistic, Hessian) else Hessian

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            outputs = list(streams)
            for members in same_streams(streams, shared=False):  # one group on the dense model's stream
                if dense:
                    output, norms = runner.replay(block, streams[0], calls, statistic)
                    outputs = [output] * len(plans)
                else:
                    norms = runner.inputs_of(block, streams[members[0]], calls, statistic)
                changes = evaluator.changes(block, norms, [plans[member] for member in members])
                for member, change_of in zip(members, changes):
                    errors[member].append(_block_error(block, norms, change_of))
                    if not dense and index < last:  # the last block's outputs are not needed
                        with trial_weights(block.pruned, change_of):
                            outputs[member] = runner.output(block, streams[member], calls)
            return outputs

        runner.run(evaluator.alignment_inputs(), len(plans), visit, self.label)
        return [runner.total(by_block) for by_block in errors], {}


def _block_error(block: Block, norms: Norms, change_of: ChangeOf) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for projection in block.pruned:
        lost = projection.weight.float() - change_of(projection).applied(projection.weight).float()
        total += ((lost @ norms[projection.name].hessian) * lost).sum(dim=1).cpu().double().sum()
    return total
