"""Errors of outputs: how far next-token distributions are from the dense model's, or from the text.

Also the reconstruction error of projections (paper, appendix "Comparison with Reconstruction Error-Based Pruning").
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from ..blocks.block_inputs import Call, Stream, Streams, grouped
from ..blocks.statistics import Hessian, Norms, SquaredNorms, most_specific
from ..model.projections import Block, ChangeOf, trial_weights
from ..saliency.plan import Plan, SparsityPlan


if TYPE_CHECKING:
    from .trials import Trials


CACHED = 2**22  # logits at a time on a CPU: more would need fresh memory, which is slow
LAUNCHED = 2**26  # logits at a time on an accelerator: fewer would leave it idle

# Float32 logits of a sparse model, (positions, vocabulary), and the next tokens, (positions,) -> a float32 scalar.
Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def kl(dense: torch.Tensor) -> Compare:
    """Return a function for `KL(dense || sparse)` in nats, summed over positions, from the dense model's logits.

    Both models' logits are shifted by the dense model's normalizer, so that no large numbers cancel.
    """
    total = dense.logsumexp(dim=-1, keepdim=True)
    expected = dense - total
    probabilities = expected.exp()

    def compare(sparse: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        sparse = sparse - total
        return (torch.linalg.vecdot(probabilities, expected - sparse) + sparse.logsumexp(dim=-1)).sum()

    return compare


def nll(dense: torch.Tensor | None) -> Compare:
    """Return a function for the negative log-likelihood of the text in nats, summed over positions."""
    return lambda sparse, following: cross_entropy(sparse, following, reduction="sum")


# Name -> function from the dense model's logits to a comparison.
OUTPUT_METRICS: dict[str, Callable[[torch.Tensor], Compare]] = {"kl": kl, "nll": nll}


def output_errors(
    trials: "Trials",
    plans: Sequence[Plan],
    metric: str,
    label: str | None,
    reference: str | SparsityPlan,
    sequences: int | None,
) -> list[float]:
    """Measure [`Trials.output_errors`] in one run."""
    given = trials.stream_of(reference) if isinstance(reference, SparsityPlan) else None
    compared = trials.alignment_ids[:sequences]
    whole = len(compared) == len(trials.alignment_ids)
    # Capturing again runs no block.
    inputs = trials.alignment_inputs() if whole else trials.runner.capture(compared)

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        alike: dict[tuple, list[int]] = {}  # members with the same hidden states and plan of the block
        for member, plan in enumerate(plans):
            alike.setdefault((streams[member], plan.key(block.pruned_names)), []).append(member)
        chosen, outputs = [plans[same[0]] for same in alike.values()], list(streams)
        changes = trials.changes(block, (given or trials.dense())[0][index], chosen, updates=not given)
        for same, change_of in zip(alike.values(), changes):
            with trial_weights(block.pruned, change_of):
                output = trials.runner.output(block, streams[same[0]], calls)
            for member in same:
                outputs[member] = output
        return outputs

    if given and sequences is None and len(plans) == 1 and plans[0] is reference:
        streams = [given[1]]  # its own stream has run already
    else:
        streams = trials.runner.run(inputs, len(plans), visit, label)
    dense = trials.dense(SquaredNorms if given else None)[1] if metric == "kl" else None
    return _compare(trials, compared, dense, streams, OUTPUT_METRICS[metric])


def _compare(
    trials: "Trials", ids: torch.Tensor, dense: Stream | None, streams: Streams, metric: Callable
) -> list[float]:
    """Compare pieces of sequences, so that logits take little memory and the result does not depend on batches."""
    predicted = ids.shape[1] - 1  # the last position of a sequence predicts nothing
    limit = CACHED if trials.runner.device.type == "cpu" else LAUNCHED
    length = max(1, limit // trials.decoder.config.vocab_size)
    totals: dict[Stream, list[torch.Tensor]] = {stream: [] for stream in streams}
    by_sequence = {stream: [states for batch in stream for states in batch] for stream in {*streams, dense} - {None}}

    def logits(stream: Stream, sequence: int, positions: slice) -> torch.Tensor:
        states = by_sequence[stream][sequence][positions]
        return trials.runner.logits(ids[sequence, positions][None], states[None])[0]

    for sequence, start in product(range(len(ids)), range(0, predicted, length)):
        positions = slice(start, min(start + length, predicted))
        compare = metric(None if dense is None else logits(dense, sequence, positions))
        for stream, parts in totals.items():
            found = logits(stream, sequence, positions)
            parts.append(compare(found, ids[sequence, 1:][positions].to(found.device)).double())
    errors = {stream: torch.stack(parts).sum().item() / (len(ids) * predicted) for stream, parts in totals.items()}
    if not all(map(math.isfinite, errors.values())):
        raise ValueError("The model's logits are not finite: load the model in bfloat16 or float32.")
    return [errors[stream] for stream in streams]


def reconstruction_errors(
    trials: "Trials", plans: Sequence[SparsityPlan], reference: str, label: str | None
) -> list[float]:
    """Measure [`Trials.reconstruction_errors`] as `sum((D H) * D)`, with `D = W - M * W` and the Hessian `H = X X^T`."""
    errors: list[list[torch.Tensor]] = [[] for _ in plans]
    runner, last, dense = trials.runner, len(trials.decoder.blocks) - 1, reference == "dense"
    statistic = most_specific(Hessian, trials.saliency.statistic)

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        outputs = list(streams)
        for members in grouped(streams, shared=False):  # one group on the dense model's stream
            if dense:
                output, norms = runner.replay(block, streams[0], calls, statistic)
                outputs = [output] * len(plans)
            else:
                norms = runner.inputs_of(block, streams[members[0]], calls, statistic)
            changes = trials.changes(block, norms, [plans[member] for member in members])
            for member, change_of in zip(members, changes):
                errors[member].append(_block_error(block, norms, change_of))
                if not dense and index < last:  # the last block's outputs are not needed
                    with trial_weights(block.pruned, change_of):
                        outputs[member] = runner.output(block, streams[member], calls)
        return outputs

    runner.run(trials.alignment_inputs(), len(plans), visit, label)
    return [runner.total(per_block) for per_block in errors]


def _block_error(block: Block, norms: Norms, change_of: ChangeOf) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for projection in block.pruned:
        lost = projection.weight.float() - change_of(projection).applied(projection.weight).float()
        total += ((lost @ norms[projection.name].hessian) * lost).sum(dim=1).cpu().double().sum()
    return total
