"""The question that NeuronAL's row step asks: where a pruned model's activations deviate from the dense one's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..engine.calls import Call
from ..engine.passes import Pass, Runs
from ..engine.statistics import Norms, SquaredNorms, activation
from ..engine.streams import Streams
from ..engine.unfinished import UnfinishedRun
from ..model.projections import Block
from ..model.trial import trial_weights
from ..sparsity.plan import SparsityPlan
from .alignment import total_error
from .dense_pass import final_norms
from .engine import Engine


ERROR, PLACE = "error", "place"  # ("error", index of a block), ("place", name of a place)


@dataclass(frozen=True)
class Deviation:
    """Where a pruned model's activations deviate from the dense one's: what the row step needs to know.

    Args:
        error (`float`): the alignment error of the whole plan.
        places (`dict[str, Tensor]`):
            Name of a [`Place`] -> `a_D - a_S`, signed, float64 on the CPU, shape (features of the place,).
    """

    error: float
    places: dict[str, torch.Tensor]


class DeviationPass(Pass):
    """What [`find_deviation`] costs."""

    def runs(self, index: int, last: int) -> Runs:
        return (1, 0, 0) if self.reference == "dense" else (2, 0, int(index > 0))

    def streams(self, deep: bool) -> int:
        if self.reference == "dense":
            return super().streams(deep)
        return 5 if deep else 2  # two, and what the search for the dense input puts out


def find_deviation(
    engine: Engine, plan: SparsityPlan, reference: str, scope: str, metric: str, label: str | None
) -> Deviation:
    """Alignment error of one plan, and the deviation at every place that rows feed.

    With `reference="sparse-stream"` a block's first input is the same in both runs. There the rows of the block before
    are compared by that block's two outputs, each as this block's first projection receives it.

    Args:
        engine ([`Engine`]): runs the model.
        plan, reference, scope, metric, label: as for [`alignment_errors`].
    """

    def measure(unfinished: UnfinishedRun) -> tuple[float, dict[str, torch.Tensor]]:
        return _measure(engine, plan, reference, (scope, metric), label, unfinished)

    found = engine.records.once([plan], (reference, scope, metric, label), measure)
    return Deviation(*engine.processes.from_first(found))


def _measure(
    engine: Engine,
    plan: SparsityPlan,
    reference: str,
    measured_on: tuple[str, str],
    label: str | None,
    unfinished: UnfinishedRun,
) -> tuple[float, dict[str, torch.Tensor]]:
    runner, blocks, measured = engine.runner, engine.decoder.blocks, unfinished.measured

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        stream, dense_stream = streams
        if reference == "dense":
            dense_output, norms = dense_stream, engine.dense().norms[index]
        else:
            dense_output, norms = runner.replay(block, stream, calls, engine.saliency.statistic)
        (change_of,) = engine.applier.changes(block, norms, [plan])
        with trial_weights(block.pruned, change_of):
            output, sparse = runner.replay(block, stream, calls)
        measured[ERROR, index] = total_error(block.pruned, norms, sparse, *measured_on)
        if index > 0:
            before = norms
            if reference != "dense":  # only the first input is wanted, so no projection need be computed
                before = runner.replay(block, dense_stream, calls, skipped=list(block.projections.values()))[1]
            measured[PLACE, blocks[index - 1].name] = _difference(before[block.entry], sparse[block.entry])
        for place, difference in _inside(engine, block, norms, sparse).items():
            measured[PLACE, place] = difference
        return [output, dense_output]

    inputs = engine.alignment_inputs()
    output, dense_output = runner.run(inputs, 2, visit, label, unfinished)
    dense_final = engine.dense().final if reference == "dense" else final_norms(inputs.final_norm, dense_output)
    measured[PLACE, blocks[-1].name] = _difference(dense_final, final_norms(inputs.final_norm, output))
    error = runner.total([measured[ERROR, index] for index in range(len(blocks))])
    return error, {place: value.double().cpu() for (kind, place), value in measured.items() if kind == PLACE}


def _inside(engine: Engine, block: Block, dense: Norms, sparse: Norms) -> dict[str, torch.Tensor]:
    """Deviation of every place inside a block that rows of its pruned projections feed."""
    fed = {engine.decoder.place_fed_by(block, projection) for projection in block.pruned} - {None}
    deviations = {}
    for place in sorted((place for place in fed if place.name != block.name), key=lambda place: place.name):
        name = place.name
        if name not in dense:  # left out by the user, and not understood: its rows are treated alike
            deviations[name] = torch.zeros(place.features)
            continue
        deviations[name] = _difference(dense[name], sparse[name])
        reader = block.projections.get(name)
        if reader is not None and reader.expert is not None:
            fewest = min(dense[name].tokens, sparse[name].tokens)
            deviations[name] *= fewest >= engine.applier.min_expert_tokens  # a few tokens' deviation says nothing
    return deviations


def _difference(dense: SquaredNorms, sparse: SquaredNorms) -> torch.Tensor:
    return activation(dense.value) - activation(sparse.value)
