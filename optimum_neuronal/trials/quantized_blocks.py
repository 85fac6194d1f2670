"""Weights that are quantized once, before trials: quantizing anew for every candidate takes too long."""

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..blocks.block_inputs import BlockInputs, Call, Streams
from ..blocks.statistics import Norms
from ..files.records import Records
from ..model.projections import Block, ChangeOf, Projection
from ..packed.change import Change, NewWeight
from ..packed.formats.quantized import quantized_bytes
from ..packed.formats.sparse import of_parts, parts_of
from ..saliency.plan import DENSE, RatePlan
from ..saliency.prune_projections import prune_projections


if TYPE_CHECKING:
    from .trials import Trials


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """The projections of all blocks at one number of bits. A plan gives each these bits, or leaves it dense."""

    bits: int
    blocks: list[dict[str, torch.Tensor]] = field(default_factory=list)  # tensors of every block; empty if on disk
    records: Records = field(default_factory=Records)  # of the blocks if they are on disk

    def changes(self, index: int, plans: Sequence[RatePlan]) -> list[ChangeOf]:
        """Return a function for every plan: projection of the block at an index -> change."""
        found = (None, self.blocks[index]) if self.blocks else self.records.get(record_name(index))
        if found is None:
            where = f"{record_name(index)} cannot be read from {self.records.directory}"
            raise OSError(f"{where}: the disk is full or failing. Use another disk (work_dir).")
        return [partial(self._change, found[1], plan) for plan in plans]

    def _change(self, tensors: Mapping[str, torch.Tensor], plan: RatePlan, projection: Projection) -> Change:
        if plan.amounts[projection.name] == DENSE:
            return NewWeight(projection.weight)
        return of_parts(tensors, projection.name, projection.shape, projection.owner.dtype)


def record_name(index: int) -> str:
    return f"quantized-{index:05d}"


def quantize_blocks(trials: "Trials", bits: int, inputs: BlockInputs) -> QuantizedBlocks:
    """Quantize every projection to `bits`, on its inputs in the dense model.

    The weights lie on disk if the blocks do, or if they exceed the runner's `max_hidden_bytes`.
    """
    trials = replace(trials, saliency=trials.saliency.quick())
    runner, records = trials.runner, trials.records
    quantized = QuantizedBlocks(bits, records=_place(trials, bits))

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = runner.replay(block, streams[0], calls, trials.saliency.statistic)
        name = record_name(index)
        _, found = records.recorded(name, lambda: (None, _quantize_block(trials, block, norms, bits)))
        if not quantized.records.keeps:
            quantized.blocks.append(found)
        elif not records.keeps:
            quantized.records.put(name, None, found)
        return [output]

    runner.run(inputs, 1, visit, "quantizing the weights that candidates are made of", release=True)
    return quantized


def _place(trials: "Trials", bits: int) -> Records:
    """Return the records for quantized weights. They have no directory if the weights fit in memory."""
    runner, records, budget = trials.runner, trials.records, trials.runner.max_hidden_bytes
    size = sum(quantized_bytes(p.shape, bits, steps=True) for p in runner.decoder.projections.values())
    if not runner.loader.streams and (budget is None or size <= budget):
        return Records(processes=records.processes)
    if not records.keeps:
        folder = tempfile.mkdtemp(prefix="optimum-neuronal-")
        records = Records(folder, processes=records.processes)
        weakref.finalize(records, shutil.rmtree, folder, ignore_errors=True)
    return records


def _quantize_block(trials: "Trials", block: Block, norms: Norms, bits: int) -> dict[str, torch.Tensor]:
    tensors, plan = {}, RatePlan(dict.fromkeys(block.pruned_names, bits))
    changes, _ = prune_projections(
        trials.saliency, block.pruned, norms, plan, trials.pattern, trials.min_expert_tokens
    )
    for name, change in changes.items():
        tensors |= parts_of(change, block.projections[name].weight, name)
    return tensors
