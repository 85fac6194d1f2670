"""The final pass: block by block over all calibration sequences, each block behind the pruned ones before it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..blocks.calls import Call, Streams
from ..blocks.offload import change_offloaded
from ..blocks.paired_inputs import PairedRuns
from ..blocks.statistics import Norms, SquaredNorms, most_specific
from ..compat.accelerate import is_offloaded
from ..config.methods import Methods
from ..files.records import Finding
from ..model.projections import Block, Decoder, Projection, TrialWeights, trial_weights
from ..packed.change import Change
from ..packed.formats.quantized import QuantizedWeight
from ..packed.formats.stored_changes import StoredChange, has_parts, of_parts, parts_of
from ..saliency import Saliency
from ..saliency.plan import Plan
from ..saliency.prune_projections import Refine, prune_projections
from ..trials import Trials
from .refit import RUNS, Refit


def needs_inputs(saliency: Saliency, statistic: type[SquaredNorms]) -> bool:
    """Return True if the final pass runs the blocks: for the saliency, or for the statistic that refines masks."""
    return saliency.uses_activations or statistic is not SquaredNorms


@dataclass(frozen=True)
class FinalPruning:
    """Finds the masks of a plan, and new or quantised weights if the saliency makes such. No weight is changed.

    Args:
        trials ([`Trials`]): runs the model.
        plan ([`Plan`]): sparsity of every projection or row, or bits of every projection.
        refine (*optional*): edits every mask, see [`TopUp.refine`].
        statistic (`type[SquaredNorms]`): of the inputs that `refine` needs.
        refit ([`Refit`], *optional*): fits the kept weights, if the saliency updates weights.
        toward_dense (`bool`):
            True if the dense model's stream runs beside the sparse one, for a saliency that updates weights. A block's
            projections are then solved in the order in which they run, each on the inputs that the sparse ones before it
            leave, toward its outputs in the dense model: `min ||W X_dense - V X||^2`, see [`dense_target`].
    """

    trials: Trials
    plan: Plan
    refine: Refine | None = None
    statistic: type[SquaredNorms] = SquaredNorms
    refit: Refit | None = None
    toward_dense: bool = False

    @classmethod
    def by(cls, methods: Methods, trials: Trials, plan: Plan, refit: Refit | None) -> "FinalPruning":
        """Return the final pass of a prune with these methods."""
        refine = methods.topup.refine if methods.topup.refines else None
        return cls(trials, plan, refine, methods.topup.statistic, refit, methods.needs_dense_stream)

    def find(self) -> tuple[dict[str, Change], list[str]]:
        """Return the changes of weights by projection name, and the names of starved experts' projections."""
        trials, found, starved = self.trials, {}, []

        def take(index: int, block: Block, prune: Callable[[], Finding]) -> None:
            value, tensors = trials.records.recorded(f"block-{index:05d}", prune)
            starved.extend(value["starved"])
            found.update({p.name: stored_change(p, tensors).to(_waiting_device(p)) for p in block.pruned})

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            runs = PairedRuns(trials.runner, block, *streams, calls) if self.toward_dense else None
            take(index, block, partial(self._fit_block, block, calls, streams, runs))
            if block is trials.decoder.blocks[-1]:
                return streams  # nothing reads the last block's output
            with trial_weights(block.pruned, lambda p: found[p.name]):
                if runs is None or self.refit is not None:  # a refit changes the weights that `runs` has seen
                    sparse = trials.runner.output(block, streams[0], calls)
                else:
                    sparse = runs.output(0)
            return [sparse] if runs is None else [sparse, runs.output(1)]

        if needs_inputs(trials.saliency, self._statistic):
            trials.cache.release()
            inputs = trials.capture_all(self._statistic, self.refit and self.refit.batch_size(trials.ids.shape[1]))
            trials.runner.run(inputs, 1 + self.toward_dense, visit, "Pruning", release=True)
        else:
            trials.runner.for_each_block(
                lambda index, block: take(index, block, partial(self._solve, block, block.pruned, None)), "Pruning"
            )
        return found, starved

    @property
    def _statistic(self) -> type[SquaredNorms]:
        return most_specific(self.trials.saliency.statistic, self.statistic)

    def _fit_block(self, block: Block, calls: Sequence[Call], streams: Streams, runs: PairedRuns | None) -> Finding:
        """Return the finding of [`prune_block`], with fitted values if there is a refit."""
        found, tensors = self.prune_block(block, calls, streams, runs)
        if self.refit is None or not block.pruned:
            return found, tensors
        runner, changes = self.trials.runner, {p.name: stored_change(p, tensors) for p in block.pruned}
        expected = runner.output(block, streams[0], calls) if runs is None else runs.output(1)
        runner.block_forwards += RUNS * self.refit.epochs * streams[0].sequences
        fitted = self.refit.fit(block, changes, streams[0], expected, calls)
        for projection in block.pruned:
            name, change = projection.name, changes[projection.name]
            kept = change.unpack_mask().to(projection.weight.device)
            tensors |= parts_of(replace(change, values=fitted[name][kept]), projection.weight, name)
        return found, tensors

    def prune_block(
        self, block: Block, calls: Sequence[Call], streams: Streams, runs: PairedRuns | None = None
    ) -> Finding:
        """Return the starved experts of a block, and the packed parts of its masks or weights.

        Args:
            block ([`Block`]): with its dense weights at hand.
            calls (`Sequence[Call]`): the block's calls, one per batch.
            streams (`list[Stream]`): hidden states in front of the block, in the sparse model and perhaps in the dense one.
            runs ([`PairedRuns`], *optional*): of the block in both models, if weights are solved toward the dense model.
        """
        if runs is None:
            norms = self.trials.runner.inputs_of(block, streams[0], calls, self._statistic)
            return self._solve(block, block.pruned, self.trials.joined(norms, self._statistic))
        starved, tensors = [], {}
        for stage in runs.stages:
            solved = {p: stored_change(p, tensors) for p in block.pruned if has_parts(tensors, p.name)}
            norms = runs.inputs(stage, TrialWeights(list(solved), solved.__getitem__))
            found, own = self._solve(block, stage, norms)
            starved += found["starved"]
            tensors |= own
        return {"starved": starved}, tensors

    def _solve(self, block: Block, projections: Sequence[Projection], norms: Norms | None) -> Finding:
        """Return the starved experts among projections of a block, and the packed parts of their masks or weights."""
        trials, tensors = self.trials, {}
        changes, starved = prune_projections(
            trials.saliency, projections, norms, self.plan, trials.pattern, trials.min_expert_tokens, self.refine
        )
        for name, change in changes.items():
            tensors |= parts_of(change, block.projections[name].weight, name)
        return {"starved": starved}, tensors


def stored_change(projection: Projection, tensors: Mapping[str, torch.Tensor]) -> StoredChange:
    """Return the change of a projection's weight from the tensors of [`FinalPruning.prune_block`]."""
    return of_parts(tensors, projection.name, projection.shape, projection.owner.dtype)


def _waiting_device(projection: Projection) -> torch.device:
    """Return the device where a change waits: CPU memory for offloaded weights."""
    return torch.device("cpu") if is_offloaded(projection.module) else projection.weight.device


def apply_changes(decoder: Decoder, changes: Mapping[str, Change]) -> None:
    """Make the weights sparse, in place; offloaded ones whenever they are read from now on. Quantised ones stay dense."""
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            if isinstance(changes[name], QuantizedWeight):
                continue
            if is_offloaded(projection.module):
                change_offloaded(projection, changes[name])
            else:
                changes[name].apply_to(projection.weight)
