"""Errors of outputs: how far next-token distributions are from the dense model's, or from the text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy

from ..blocks.block_inputs import Call, Stream, Streams
from ..blocks.statistics import SquaredNorms
from ..files.records import Finding
from ..model.projections import Block, trial_weights
from ..saliency.plan import Plan
from .plan_evaluator import Measurement, PlanEvaluator


CPU_LOGITS = 2**22  # logits at a time on a CPU: more would need fresh memory, which is slow
ACCELERATOR_LOGITS = 2**26  # logits at a time on an accelerator: fewer would leave it idle

# Float32 logits of a sparse model, (positions, vocabulary), and the next tokens, (positions,) -> a float32 scalar.
Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def divergence(dense: torch.Tensor) -> Compare:
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


@dataclass(frozen=True)
class OutputErrors(Measurement):
    """The error of every plan's next-token distributions, in nats per predicted token.

    Args:
        metric (`str`): `"kl"` to the dense model's distributions, or `"nll"` of the text.
        label (`str`, *optional*): of the progress bar.
        stream_of ([`Plan`], *optional*):
            Plan whose hidden states the saliency is measured on; even a weight-updating saliency then only prunes by
            score. None: the dense model's.
        sequences (`int`, *optional*): number of alignment sequences to compare. None: all.
    """

    shares_plans: ClassVar[bool] = True

    metric: str
    label: str | None = field(default=None, compare=False)
    stream_of: Plan | None = None
    sequences: int | None = None

    def measure(self, evaluator: PlanEvaluator, plans: Sequence[Plan]) -> Finding:
        given = None if self.stream_of is None else evaluator.stream_of(self.stream_of)
        compared = evaluator.alignment_ids[: self.sequences]
        whole = len(compared) == len(evaluator.alignment_ids)
        # Capturing again runs no block.
        inputs = evaluator.alignment_inputs() if whole else evaluator.runner.capture(compared)

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            alike: dict[tuple, list[int]] = {}  # members with the same hidden states and plan of the block
            for member, plan in enumerate(plans):
                alike.setdefault((streams[member], plan.key(block.pruned_names)), []).append(member)
            chosen, outputs = [plans[same[0]] for same in alike.values()], list(streams)
            changes = evaluator.changes(block, (given or evaluator.dense())[0][index], chosen, updates=not given)
            for same, change_of in zip(alike.values(), changes):
                with trial_weights(block.pruned, change_of):
                    output = evaluator.runner.output(block, streams[same[0]], calls)
                for member in same:
                    outputs[member] = output
            return outputs

        if given and self.sequences is None and len(plans) == 1 and plans[0] is self.stream_of:
            streams = [given[1]]  # its own stream has run already
        else:
            streams = evaluator.runner.run(inputs, len(plans), visit, self.label)
        dense = evaluator.dense(SquaredNorms if given else None)[1] if self.metric == "kl" else None
        return compare_outputs(evaluator, compared, dense, streams), {}


def compare_outputs(
    evaluator: PlanEvaluator, ids: torch.Tensor, dense: Stream | None, streams: Streams
) -> list[float]:
    """Return the mean KL divergence of streams from the dense model's, or the text's negative log-likelihood without one.

    It is computed by pieces of sequences: logits take little memory, and batches change nothing.
    """
    text = partial(cross_entropy, reduction="sum")
    predicted = ids.shape[1] - 1  # the last position of a sequence predicts nothing
    limit = CPU_LOGITS if evaluator.runner.device.type == "cpu" else ACCELERATOR_LOGITS
    length = max(1, limit // evaluator.decoder.config.vocab_size)
    totals: dict[Stream, list[torch.Tensor]] = {stream: [] for stream in streams}
    by_sequence = {stream: [states for batch in stream for states in batch] for stream in {*streams, dense} - {None}}

    def logits(stream: Stream, sequence: int, positions: slice) -> torch.Tensor:
        states = by_sequence[stream][sequence][positions]
        return evaluator.runner.logits(ids[sequence, positions][None], states[None])[0]

    for sequence, start in product(range(len(ids)), range(0, predicted, length)):
        positions = slice(start, min(start + length, predicted))
        compare: Compare = text if dense is None else divergence(logits(dense, sequence, positions))
        for stream, parts in totals.items():
            sparse = logits(stream, sequence, positions)
            parts.append(compare(sparse, ids[sequence, 1:][positions].to(sparse.device)).double())
    errors = {stream: torch.stack(parts).sum().item() / (len(ids) * predicted) for stream, parts in totals.items()}
    if not all(map(math.isfinite, errors.values())):
        raise ValueError("The model's logits are not finite: load the model in bfloat16 or float32.")
    return [errors[stream] for stream in streams]
