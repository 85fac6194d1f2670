"""Deviations of activations at the places that rows feed, by which NeuronAL's row step spreads sparsity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..blocks.block_inputs import Call, Stream, Streams, to_device
from ..blocks.statistics import Norms, SquaredNorms, activation
from ..files.records import Finding
from ..model.projections import Block, trial_weights
from ..saliency.plan import Plan
from .alignment import normalized, total_error
from .plan_evaluator import Measurement, PlanEvaluator


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
