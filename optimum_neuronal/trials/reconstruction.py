"""Reconstruction error of sparsity plans, the paper's comparison for its alignment error.

Its appendix "Comparison with Reconstruction Error-Based Pruning" has the error of one projection. Here errors are summed.
"""

from collections.abc import Sequence

import torch

from ..blocks.calls import Call, Streams, grouped
from ..blocks.statistics import Hessian, Norms, most_specific
from ..model.projections import Block, ChangeOf, trial_weights
from ..saliency.plan import SparsityPlan
from .engine import Engine


def reconstruction_errors(
    engine: Engine, plans: Sequence[SparsityPlan], reference: str, label: str | None
) -> list[float]:
    """Return `sum over projections of || W X - (M * W) X ||_2^2` of every plan over the alignment sequences.

    It is computed exactly, without the outputs: as `sum of (D H) * D`, with `D = W - M * W` and the Hessian `H = X X^T`.

    Args:
        engine ([`Engine`]): runs the model on its alignment sequences.
        plans (`Sequence[SparsityPlan]`): the candidates; no plan is applied.
        reference (`str`):
            Source of X and saliency. `"sparse-stream"`: the dense block run on the plan's own hidden states;
            `"dense"`: the dense model's own stream, so that one run serves all plans.
        label (`str`, *optional*): of the progress bar.

    Returns:
        `list[float]`: one error per plan, not normalised: wide projections with large inputs count most.
    """

    def measure() -> tuple[list[float], dict]:
        mine = engine.processes.deal(plans)
        return engine.processes.collect(_errors(engine, mine, reference, label) if mine else []), {}

    return engine.measured(plans, ("reconstruction", reference, label), measure)[0]


def _errors(engine: Engine, plans: Sequence[SparsityPlan], reference: str, label: str | None) -> list[float]:
    errors: list[list[torch.Tensor]] = [[] for _ in plans]
    runner, last = engine.runner, len(engine.decoder.blocks) - 1
    statistic = most_specific(Hessian, engine.saliency.statistic)

    def compare(block: Block, norms: Norms, members: Sequence[int]) -> list[ChangeOf]:
        changes = engine.applier.changes(block, norms, [plans[member] for member in members])
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
    runner.run(engine.alignment_inputs(), 1 if dense else len(plans), visit_dense if dense else visit, label)
    return [runner.total(per_block) for per_block in errors]


def _block_error(block: Block, norms: Norms, change_of: ChangeOf) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for projection in block.pruned:
        lost = projection.weight.float() - change_of(projection).applied(projection.weight).float()
        total += ((lost @ norms[projection.name].hessian) * lost).sum(dim=1).cpu().double().sum()
    return total
