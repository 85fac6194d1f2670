"""The final pass: block by block over all calibration sequences, each block behind the pruned ones before it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch

from ..compat.accelerate import is_offloaded
from ..engine.calls import Call, Stream, Streams
from ..engine.offload import change_offloaded
from ..engine.paired_inputs import STAGES, PairedRuns
from ..engine.passes import CalibrationPass, Runs
from ..engine.statistics import Norms, SquaredNorms, most_specific
from ..files.records import Finding
from ..formats.bitmask import MASK, VALUES
from ..formats.packed import PackedMask, PackedWeight
from ..model.projections import Block, Decoder, Projection
from ..model.trial import TrialWeights, trial_weights
from ..saliency import Saliency
from ..sparsity.masks import Change, Zeros
from ..sparsity.plan import SparsityPlan
from ..trials.applier import Refine
from ..trials.engine import Engine
from .refit import RUNS, Refit, fit_and_round


def needs_inputs(saliency: Saliency, statistic: type[SquaredNorms]) -> bool:
    """Whether the final pruning runs the blocks: for the saliency, or for the statistic that masks are refined by."""
    return saliency.uses_activations or statistic is not SquaredNorms


class PruningPass(CalibrationPass):
    """What [`FinalPruning.find`] costs."""

    def runs(self, index: int, last: int) -> Runs:
        return int(index < last), 1, 0


class FinalPruning:
    """Finds the masks of a plan, and the new weights where the saliency updates them. No weight is changed.

    Args:
        engine ([`Engine`]): runs the model.
        plan ([`SparsityPlan`]): sparsity of every projection or row.
        refine (*optional*): projection, mask, saliency, statistic of its inputs -> mask; applied to every mask.
        statistic (`type[SquaredNorms]`): what `refine` wants to know of a projection's inputs.
        refit ([`Refit`], *optional*): fits the weights that stay, where the saliency updates weights.

    Attributes:
        streams (`int`): of hidden states that it carries along: the sparse model's.
        starved_experts (`list[str]`): the experts' projections that fell back.
    """

    streams: ClassVar[int] = 1

    def __init__(
        self,
        engine: Engine,
        plan: SparsityPlan,
        refine: Refine | None = None,
        statistic: type[SquaredNorms] = SquaredNorms,
        refit: Refit | None = None,
    ):
        self.engine, self.plan, self.refine, self.refit = engine, plan, refine, refit
        # Refit moves values, and rounds them afterwards.
        self.applier = engine.applier if refit is None else engine.applier.unrounded()
        self.statistic = most_specific(engine.saliency.statistic, statistic)
        self.starved_experts: list[str] = []

    def find(self) -> dict[str, Change]:
        """Projection name -> what becomes of its weight."""
        engine, found = self.engine, {}

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            found.update(self._block(index, block, partial(self._found, block, calls, streams)))
            if block is engine.decoder.blocks[-1]:
                return streams  # nothing reads the last block's output
            with trial_weights(block.pruned, lambda p: found[p.name]):
                sparse = self.output(0, block, calls, streams)
            return [sparse, *(self.output(index, block, calls, streams) for index in range(1, len(streams)))]

        if needs_inputs(engine.saliency, self.statistic):
            engine.cache.release()
            inputs = engine.capture_all(self.statistic, self.refit and self.refit.batch_size(engine.ids.shape[1]))
            engine.runner.run(inputs, self.streams, visit, "Pruning", release=True)
        else:
            for index in range(len(engine.decoder.blocks)):
                with engine.runner.loader.loaded(index) as block:
                    found.update(self._block(index, block, partial(self.solve, block, block.pruned, None)))
        return found

    def _found(self, block: Block, calls: Sequence[Call], streams: Streams) -> Finding:
        """What [`prune_block`] finds, with refitted values."""
        starved, tensors = self.prune_block(block, calls, streams)
        if self.refit is not None and block.pruned:
            changes = {p.name: stored_change(p, tensors) for p in block.pruned}
            expected = self.output(len(streams) - 1, block, calls, streams)
            fit = self.refit.fit
            if self.engine.applier.value_bits is not None:
                fit = partial(fit_and_round, self.engine, self.refit)
            fitted = fit(block, changes, streams[0], expected, calls)
            self.engine.runner.block_forwards += RUNS * self.refit.epochs * streams[0].sequences
            for projection in block.pruned:
                kept = changes[projection.name].mask.unpack(projection.weight.device)
                tensors[projection.name + VALUES] = fitted[projection.name][kept]
        return starved, tensors

    def output(self, index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Stream:
        """What a block makes of one of the streams, with the weights that it has at the moment."""
        return self.engine.runner.output(block, streams[index], calls)

    def prune_block(self, block: Block, calls: Sequence[Call], streams: Streams) -> Finding:
        """The starved experts of a block, and what its packed masks and weights consist of."""
        norms = self.engine.runner.inputs_of(block, streams[0], calls, self.statistic)
        return self.solve(block, block.pruned, self.engine.joined(norms, self.statistic))

    def solve(self, block: Block, projections: Sequence[Projection], norms: Norms | None) -> Finding:
        """Return the starved experts among projections of a block, and the packed parts of their masks or weights."""
        activations, starved = {}, []
        if norms is not None:
            activations, starved = self.applier.activations(block, norms, projections)
        tensors = {}
        for name, change in self.applier.prune(projections, norms, activations, self.plan, self.refine).items():
            if isinstance(change, Zeros):
                tensors[name + MASK] = PackedMask.pack(change.mask).bits
            else:
                tensors |= PackedWeight.pack(change.applied(block.projections[name].weight)).parts(name)
        return {"starved": starved}, tensors

    def _block(self, index: int, block: Block, prune: Callable[[], Finding]) -> dict[str, Change]:
        """What becomes of one block's weights, recorded or found now."""
        found, tensors = self.engine.records.recorded(f"block-{index:05d}", prune)
        self.starved_experts += found["starved"]
        return {p.name: stored_change(p, tensors).to(_waiting_device(p)) for p in block.pruned}


def stored_change(projection: Projection, tensors: Mapping[str, torch.Tensor]) -> PackedMask | PackedWeight:
    """What becomes of a projection's weight, from what [`FinalPruning.prune_block`] has found."""
    if projection.name + VALUES in tensors:
        return PackedWeight.of_parts(tensors, projection.name, projection.shape)
    return PackedMask(tensors[projection.name + MASK], projection.shape)


def _waiting_device(projection: Projection) -> torch.device:
    """Masks of offloaded weights wait in CPU memory, like the weights."""
    return torch.device("cpu") if is_offloaded(projection.module) else projection.weight.device


class DenseTargetsPass(PruningPass):
    """What [`DenseTargets.find`] costs."""

    def runs(self, index: int, last: int) -> Runs:
        # Runs to the inputs of a stage end there and begin behind what is known: half a block for both models. Of experts
        # they are whole ones; the runs to the block's end are less than whole.
        return 2 * int(index < last) + STAGES // 2, 0, 0

    def hidden_sequences(self, samples: int, alignment: int, deep: bool) -> int:
        # Of two streams what goes in and comes out; what parts of the block put out, one in the sparse model, two in the dense.
        return 2 * super().hidden_sequences(samples, alignment, deep) + 2 * samples


class DenseTargets(FinalPruning):
    """Finds what becomes of weights where the saliency updates them; the dense model's stream runs beside the sparse one.

    A block's projections are solved in the order in which they run, each on the inputs that the sparse ones before it
    leave, toward the outputs that it has in the dense model: `min ||W X_dense - V X||^2`, see [`dense_target`].
    """

    streams: ClassVar[int] = 2
    _runs: PairedRuns | None = None  # of the block that was solved last

    def prune_block(self, block: Block, calls: Sequence[Call], streams: Streams) -> Finding:
        self._runs = PairedRuns(self.engine.runner, block, *streams, calls)
        tensors, starved = {}, []
        for stage in self._runs.stages:
            norms = self._runs.inputs(stage, _prepared(block, tensors))
            found, own = self.solve(block, stage, norms)
            starved += found["starved"]
            tensors |= own
        return {"starved": starved}, tensors

    def output(self, index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Stream:
        solved = self._runs is not None and self._runs.block is block  # else it was recorded
        if not solved or (index == 0 and self.refit is not None):  # a refit changes what was solved
            return super().output(index, block, calls, streams)
        return self._runs.output(index)


def _prepared(block: Block, tensors: Mapping[str, torch.Tensor]) -> TrialWeights:
    """The sparse weights of those of a block's projections that are solved already."""
    done = [p for p in block.pruned if p.name + MASK in tensors]
    return TrialWeights(done, lambda p: stored_change(p, tensors))


def apply_changes(decoder: Decoder, changes: Mapping[str, Change]) -> None:
    """Makes the weights sparse, in place; offloaded ones whenever they are read from then on."""
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            if is_offloaded(projection.module):
                change_offloaded(projection, changes[name])
            else:
                changes[name].apply_to(projection.weight)
