"""The final pass over all calibration sequences: each block runs on the outputs of the pruned blocks before it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from ..blocks.block_inputs import Call, Stream, Streams
from ..blocks.offload import change_offloaded
from ..blocks.statistics import Norms, SquaredNorms, most_specific
from ..compat.hf_private import is_offloaded, offload_hook
from ..files.records import Finding
from ..model.change import Change, NewWeight, PackedChange
from ..model.projections import Block, Decoder, Projection, trial_weights
from ..saliency.plan import Plan
from ..saliency.prune_projections import Refine, prune_projections
from ..trials import Trials
from .refit import RUNS, Refit, first_zeros


LABEL = "changing the weights, block by block"


@dataclass(frozen=True)
class FinalPruning:
    """Finds the masks of a plan, and new weights if the saliency makes them. No weight is changed.

    For a refit, the dense model's stream runs beside the sparse one: each block is fitted to its output in the dense model.
    """

    trials: Trials
    plan: Plan
    refine: Refine | None = None  # edits every mask, see TopUp.refine
    statistic: type[SquaredNorms] = SquaredNorms  # of the inputs that `refine` needs
    refit: Refit | None = None

    def find(self) -> tuple[dict[str, Change], list[str]]:
        """Return the changes of weights by projection name, and the names of starved experts' projections."""
        trials, found, starved = self.trials, {}, []

        def take(index: int, block: Block, prune: Callable[[], Finding]) -> None:
            value, tensors = trials.records.recorded(f"block-{index:05d}", prune)
            starved.extend(value["starved"])
            for p in block.pruned:  # changes of offloaded weights wait in CPU memory
                device = torch.device("cpu") if is_offloaded(p.module) else p.weight.device
                found[p.name] = stored_change(p, tensors).to(device)

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            dense = [trials.runner.output(block, stream, calls) for stream in streams[1:]]
            if block.pruned:
                take(index, block, partial(self._fit_block, block, calls, streams[0], *dense))
            if block is trials.decoder.blocks[-1]:
                return streams  # nothing reads the last block's output
            with trial_weights(block.pruned, lambda p: found[p.name]):
                return [trials.runner.output(block, streams[0], calls), *dense]

        if trials.saliency.uses_activations or self._statistic is not SquaredNorms:
            trials.cache.release()
            inputs = trials.capture_all(self._statistic, self.refit and self.refit.batch_size(trials.ids.shape[1]))
            trials.runner.run(inputs, 1 if self.refit is None else 2, visit, LABEL, release=True)
        else:
            trials.runner.for_each_block(
                lambda index, block: take(index, block, partial(self._solve, block, None, self.plan)), LABEL
            )
        return found, starved

    @property
    def _statistic(self) -> type[SquaredNorms]:
        return most_specific(self.trials.statistic, self.statistic)

    def _fit_block(
        self, block: Block, calls: Sequence[Call], inputs: Stream, expected: Stream | None = None
    ) -> Finding:
        """Return the finding of a block, which `inputs` enter. A refit fits its values to the `expected` output."""
        norms = self.trials.runner.inputs_of(block, inputs, calls, self._statistic)
        refit = self.refit if expected is not None else None
        adds = refit is not None and self.trials.pattern is None
        plan = first_zeros(self.plan, block.pruned) if adds else self.plan
        found, tensors = self._solve(block, self.trials.joined(norms, self._statistic), plan)
        if refit is None:
            return found, tensors
        energies = {name: norm.value.sum(dim=0) for name, norm in norms.items()}
        runner, changes = self.trials.runner, {p.name: stored_change(p, tensors) for p in block.pruned}
        runner.block_forwards += RUNS * refit.epochs * inputs.sequences
        fitted = refit.fit(block, changes, energies, inputs, expected, calls, self.plan if adds else None)
        for projection in block.pruned:
            refitted = PackedChange.pack(NewWeight(fitted[projection.name]), projection.weight)
            tensors |= refitted.tensors(projection.name)
        return found, tensors

    def _solve(self, block: Block, norms: Norms | None, plan: Plan) -> Finding:
        """Return the starved experts of a block, and the packed parts of their masks or weights."""
        trials, tensors = self.trials, {}
        changes, starved = prune_projections(
            trials.saliency, block.pruned, norms, plan, trials.pattern, trials.min_expert_tokens, self.refine
        )
        for name, change in changes.items():
            tensors |= PackedChange.pack(change, block.projections[name].weight).tensors(name)
        return {"starved": starved}, tensors


def stored_change(projection: Projection, tensors: Mapping[str, torch.Tensor]) -> PackedChange:
    """Return the change of a projection's weight from the tensors of a finding."""
    return PackedChange.of_tensors(tensors, projection.name, projection.shape)


def apply_changes(decoder: Decoder, changes: Mapping[str, Change]) -> None:
    """Change the weights, in place; offloaded ones whenever they are read from now on."""
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            if is_offloaded(projection.module):
                change_offloaded(projection, changes[name])
            else:
                changes[name].apply_to(projection.weight)


@contextmanager
def changed_weights(decoder: Decoder, changes: Mapping[str, Change]) -> Iterator[None]:
    """Let a model compute with changes while the context lasts, offloaded ones whenever their weights are read."""
    projections = list(decoder.projections.values())
    offloaded = [p for p in projections if is_offloaded(p.module)]
    maps = {hook: hook.weights_map for hook in (offload_hook(p.module) for p in offloaded)}
    try:
        for projection in offloaded:
            change_offloaded(projection, changes[projection.name])
        with trial_weights([p for p in projections if p not in offloaded], lambda p: changes[p.name]):
            yield
    finally:
        for hook, weights in maps.items():
            hook.weights_map = weights
