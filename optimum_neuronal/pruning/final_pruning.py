"""The final pruning: block by block over all calibration sequences, each block behind the pruned ones before it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ..decoder.placement import is_offloaded
from ..decoder.projections import Block, Projection
from ..decoder.trial import trial_weights
from ..engine.calls import Call
from ..engine.engine import Engine
from ..engine.passes import CalibrationPass, Runs
from ..engine.records import Finding
from ..engine.streams import Streams
from ..metrics.statistics import Norms, SquaredNorms, most_specific
from ..saliency import Saliency
from ..sparsity.bitmask import MASK, VALUES
from ..sparsity.changes import Change
from ..sparsity.packed import PackedMask, PackedWeight
from ..sparsity.plan import SparsityPlan


Refine = Callable[[Projection, torch.Tensor, torch.Tensor, SquaredNorms | None], torch.Tensor]


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

    Attributes:
        starved_experts (`list[str]`): the experts' projections that fell back.
    """

    def __init__(
        self,
        engine: Engine,
        plan: SparsityPlan,
        refine: Refine | None = None,
        statistic: type[SquaredNorms] = SquaredNorms,
    ):
        self.engine, self.plan, self.refine = engine, plan, refine
        self.statistic = most_specific(engine.saliency.statistic, statistic)
        self.starved_experts: list[str] = []

    def find(self) -> dict[str, Change]:
        """Projection name -> what becomes of its weight."""
        engine, runner, found = self.engine, self.engine.runner, {}

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            def prune() -> Finding:
                norms = runner.inputs_of(block, streams[0], calls, self.statistic)
                return self._prune_block(block, engine.joined(norms, self.statistic))

            found.update(self._block(index, block, prune))
            if block is engine.decoder.blocks[-1]:
                return streams  # nothing reads the last block's output
            with trial_weights(block.pruned, lambda p: found[p.name]):
                return [runner.output(block, streams[0], calls)]

        if needs_inputs(engine.saliency, self.statistic):
            engine.release()
            inputs = engine.capture_all(self.statistic)
            runner.run(inputs, 1, visit, "Pruning", release=True)
        else:
            for index in range(len(engine.decoder.blocks)):
                with runner.loader.loaded(index) as block:
                    found.update(self._block(index, block, partial(self._prune_block, block, None)))
        return found

    def _prune_block(self, block: Block, norms: Norms | None) -> Finding:
        """The starved experts of a block, and what its packed masks and weights consist of."""
        applier = self.engine.applier
        activations, starved = ({}, []) if norms is None else applier.activations(block, norms)
        tensors, finite = {}, {}
        for projection in block.pruned:
            name = projection.name
            if applier.saliency.updates_weights:
                packed = PackedWeight.pack(applier.updated(projection, norms, activations[name], self.plan))
                finite[name] = torch.isfinite(packed.values).all()
                mask, tensors[name + VALUES] = packed.mask, packed.values
            else:
                score = applier.score(projection, activations)
                finite[name] = torch.isfinite(score).all()
                mask = PackedMask.pack(~self._mask(projection, activations, norms, score))
            tensors[name + MASK] = mask.bits
        for name, is_finite in zip(finite, torch.stack(list(finite.values())).tolist() if finite else ()):
            if not is_finite:
                raise ValueError(f"The saliency of {name} is not finite: its inputs overflow in the model's dtype.")
        return {"starved": starved}, tensors

    def _mask(
        self, projection: Projection, activations: Mapping[str, torch.Tensor], norms: Norms | None, score: torch.Tensor
    ) -> torch.Tensor:
        mask = self.engine.applier.mask(projection, score, self.plan)
        if self.refine is None:
            return mask
        return self.refine(projection, mask, score, None if norms is None else norms[projection.name])

    def _block(self, index: int, block: Block, prune: Callable[[], Finding]) -> dict[str, Change]:
        """What becomes of one block's weights, recorded or found now."""
        found, tensors = self.engine.records.recorded(f"block-{index:05d}", prune)
        self.starved_experts += found["starved"]
        packed = {}
        for projection in block.pruned:
            name, values = projection.name, tensors.get(projection.name + VALUES)
            mask = PackedMask(tensors[name + MASK], projection.shape)
            change = mask if values is None else PackedWeight(mask, values)
            packed[name] = change.to(_waiting_device(projection))
        return packed


def _waiting_device(projection: Projection) -> torch.device:
    """Masks of offloaded weights wait in CPU memory, like the weights."""
    return torch.device("cpu") if is_offloaded(projection.module) else projection.weight.device
