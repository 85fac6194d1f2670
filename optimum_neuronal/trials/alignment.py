"""How far activations of a sparse model are from the dense model's: alignment errors, reconstruction errors, deviations."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import normalize

from ..blocks.block_inputs import Call, Stream, Streams, same_streams, to_device
from ..blocks.statistics import Hessian, Norms, SquaredNorms, activation, wide_dtype
from ..files.records import Finding
from ..model.projections import Block, ChangeOf, Projection, trial_weights
from ..saliency.plan import Plan
from .plan_evaluator import Measurement, PlanEvaluator


REFERENCES = ("sparse-stream", "dense")
SMALLEST_SHARE = 1e-9  # of one input feature; the average is one in several thousand


def l2(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """Return `|| d - s ||_2` of normalized activations, shape (sequences, in) -> (sequences,)."""
    return torch.linalg.vector_norm(dense - sparse, dim=-1)


def cosine(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """Return `1 - cos(d, s)` of normalized activations, shape (sequences, in) -> (sequences,).

    `|| d / |d| - s / |s| ||^2 / 2` keeps the digits of small angles and is never negative.
    """
    dense, sparse = (normalize(activations, dim=-1, eps=1e-30) for activations in (dense, sparse))
    return (dense - sparse).square().sum(dim=-1) / 2


def kl(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """Return `KL(d || s) = sum of d log(d / s) - d + s` in nats, shape (sequences, in) -> (sequences,).

    Smaller shares count as `SMALLEST_SHARE`, because silenced features would make it infinite. `- d + s`, which sums to
    zero over a distribution, keeps every term non-negative.
    """
    dense, sparse = dense.clamp(min=SMALLEST_SHARE), sparse.clamp(min=SMALLEST_SHARE)
    return (dense * (dense / sparse).log() - dense + sparse).sum(dim=-1)


METRICS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"l2": l2, "cosine": cosine, "kl": kl}
SCOPES = ("sequence", "pooled")


def alignment_error(
    dense: torch.Tensor, sparse: torch.Tensor, scope: str = "sequence", metric: str = "l2"
) -> torch.Tensor:
    """Return the alignment error of one projection: `metric(a_D / sum(a_D), a_S / sum(a_S)) / in`, a scalar.

    `dense` and `sparse` are squared norms of the projection's input, (sequences, in). With the scope `"sequence"`, errors
    are summed over the sequences (paper, Eq. 3). With `"pooled"`, activations are pooled over them (the authors' code).
    """
    if scope == "pooled":
        dense, sparse = dense.mean(dim=0, keepdim=True), sparse.mean(dim=0, keepdim=True)
    errors = METRICS[metric](normalized(dense), normalized(sparse))
    return errors.sum() / dense.shape[-1]


def total_error(
    projections: Sequence[Projection], dense: Norms, sparse: Norms, scope: str, metric: str
) -> torch.Tensor:
    """Return the sum of the alignment errors of projections.

    The experts of a layer count as one projection, each weighted with its share of the dense model's routed tokens.
    """
    tokens = Counter()
    for projection in projections:
        if projection.expert is not None:
            tokens[projection.group] += dense[projection.name].tokens
    errors: dict[SquaredNorms, torch.Tensor] = {}  # projections that share an input share its norms
    total = torch.zeros(())
    for projection in projections:
        name = projection.name
        if sparse[name] not in errors:
            errors[sparse[name]] = alignment_error(dense[name].value, sparse[name].value, scope, metric)
        share = 1.0 if projection.expert is None else dense[name].tokens / max(1, tokens[projection.group])
        total = total + share * errors[sparse[name]]
    return total


def normalized(squared_norms: torch.Tensor) -> torch.Tensor:
    activations = squared_norms.to(wide_dtype(squared_norms.device)).sqrt()
    # An input that is zero everywhere (dead ReLUs) stays zero, instead of 0 / 0.
    return activations / activations.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(activations.dtype).tiny)


@dataclass(frozen=True)
class AlignmentErrors(Measurement):
    """The alignment error of every plan, summed over all pruned projections (paper, Eq. 3).

    Args:
        reference (`str`):
            Source of dense activations and saliency. `"dense"`: the dense model. `"sparse-stream"`: the dense block on the
            plan's own hidden states.
        scope, metric (`str`): see [`alignment_error`].
        label (`str`, *optional*): of the progress bar.
        bound (`float`): plans are abandoned when their error exceeds this. Their error is infinite.
    """

    shares_plans: ClassVar[bool] = True

    reference: str
    scope: str = "sequence"
    metric: str = "l2"
    label: str | None = field(default=None, compare=False)
    bound: float = math.inf

    def measure(self, evaluator: PlanEvaluator, plans: Sequence[Plan]) -> Finding:
        runner, last = evaluator.runner, len(evaluator.decoder.blocks) - 1
        errors: list[list[torch.Tensor]] = [[] for _ in plans]  # of every plan, block by block

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            outputs: Streams = [None] * len(plans)  # stays None for abandoned plans
            unread = runner.output_projections(block) if index == last else ()
            for members in same_streams(streams, shared=self.reference == "dense"):
                if self.reference == "dense":
                    norms = evaluator.dense()[0][index]
                else:
                    norms = runner.inputs_of(block, streams[members[0]], calls, evaluator.statistic)
                changes = evaluator.changes(block, norms, [plans[member] for member in members])
                for member, change_of in zip(members, changes):
                    with trial_weights(block.pruned, change_of):
                        output, sparse = runner.replay(block, streams[member], calls, evaluator.norms, unread)
                    errors[member].append(total_error(block.pruned, norms, sparse, self.scope, self.metric))
                    if self.bound == math.inf or runner.total(errors[member]) <= self.bound:
                        outputs[member] = output
            return outputs

        runner.run(evaluator.alignment_inputs(), len(plans), visit, self.label)
        return [runner.total(by_block) if len(by_block) == last + 1 else math.inf for by_block in errors], {}


@dataclass(frozen=True)
class ReconstructionErrors(Measurement):
    """The reconstruction error of every plan: `sum over projections of || W X - (M * W) X ||_2^2`.

    See the paper's appendix "Comparison with Reconstruction Error-Based Pruning".

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


@dataclass(frozen=True)
class Deviation:
    """The deviation of a pruned model's activations from the dense model's."""

    error: float  # the alignment error of the plan
    places: dict[str, torch.Tensor]  # name of a `Place` -> its `DEVIATIONS`, float64 on the CPU, shape (features,)


def signed_deviation(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """Return `a_D - a_S` over all sequences, shape (features,), from squared norms, shape (sequences, features)."""
    return activation(dense) - activation(sparse)


def printed_deviation(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """Return each feature's part in Eq. 2, summed over the sequences: `sum of |a_D / sum(a_D) - a_S / sum(a_S)|`."""
    return (normalized(dense) - normalized(sparse)).abs().sum(dim=0)


DEVIATIONS = {"signed": signed_deviation, "printed": printed_deviation}


@dataclass(frozen=True)
class Deviations(Measurement):
    """The [`Deviation`] of one plan at every place that rows feed.

    With `reference="sparse-stream"`, both runs of a block have the same first input. There the rows of the previous block
    are compared by its two outputs, as this block's first projection receives them.

    Args:
        reference, scope, metric, label: see [`AlignmentErrors`].
        kind (`str`): one of `DEVIATIONS`.
    """

    reference: str
    scope: str = "sequence"
    metric: str = "l2"
    label: str | None = field(default=None, compare=False)
    kind: str = "signed"

    def result(self, value: float, tensors: dict[str, torch.Tensor]) -> Deviation:
        return Deviation(value, tensors)

    def measure(self, evaluator: PlanEvaluator, plans: Sequence[Plan]) -> Finding:
        runner, blocks, deviate = evaluator.runner, evaluator.decoder.blocks, DEVIATIONS[self.kind]
        errors: list[torch.Tensor] = []
        places: dict[str, torch.Tensor] = {}

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            stream, dense_stream = streams
            if self.reference == "dense":
                dense_output, norms = dense_stream, evaluator.dense()[0][index]
            else:
                dense_output, norms = runner.replay(block, stream, calls, evaluator.statistic)
            (change_of,) = evaluator.changes(block, norms, plans)
            with trial_weights(block.pruned, change_of):
                output, sparse = runner.replay(block, stream, calls, evaluator.norms)
            errors.append(total_error(block.pruned, norms, sparse, self.scope, self.metric))
            if index > 0:
                before = norms
                if self.reference != "dense":  # only the first input is needed, so skip all projections
                    before = runner.replay(block, dense_stream, calls, skipped=list(block.projections.values()))[1]
                places[blocks[index - 1].name] = deviate(before[block.entry].value, sparse[block.entry].value)
            places.update(_inside(evaluator, block, norms, sparse, deviate))
            return [output, dense_output]

        inputs = evaluator.alignment_inputs()
        output, dense_output = runner.run(inputs, 2, visit, self.label)
        outputs = evaluator.dense()[1] if self.reference == "dense" else dense_output, output
        norms = [final_norms(inputs.final_norm, stream, runner.device).value for stream in outputs]
        places[blocks[-1].name] = deviate(*norms)
        return runner.total(errors), {place: value.double().cpu() for place, value in places.items()}


def _inside(
    evaluator: PlanEvaluator, block: Block, dense: Norms, sparse: Norms, deviate: Callable
) -> dict[str, torch.Tensor]:
    """Return the deviation of every place inside a block that rows of pruned projections feed."""
    fed = [evaluator.decoder.place_fed_by(block, projection) for projection in block.pruned]
    deviations = {}
    for name, place in {place.name: place for place in fed if place and place.name != block.name}.items():
        reader = block.projections.get(name)
        if name not in dense:  # ignored by the user: all rows are treated alike
            deviations[name] = torch.zeros(place.features)
            continue
        deviations[name] = deviate(dense[name].value, sparse[name].value)
        if reader is not None and reader.expert is not None:  # too few tokens say nothing
            deviations[name] *= min(dense[name].tokens, sparse[name].tokens) >= evaluator.min_expert_tokens
    return deviations


def final_norms(final_norm: nn.Module | None, stream: Stream, device: torch.device) -> SquaredNorms:
    """Return the squared norms of the last block's output, which may be in CPU memory, after the final norm."""
    norms = SquaredNorms()
    for states in (to_device(states, device) for states in stream):
        norms.update(states if final_norm is None else final_norm(states), len(states))
    return norms
