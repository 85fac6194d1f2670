"""Weights that are solved at a few sparsities or numbers of bits, before trials use them.

Solving anew for every candidate takes too long. Solved weights change little between two near sparsities, so trials
interpolate.
"""

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from ..blocks.block_inputs import BlockInputs, Call, Streams
from ..blocks.statistics import Norms
from ..files.records import Records
from ..model.projections import Block, ChangeOf, Projection
from ..packed.change import Change, NewWeight
from ..packed.formats.quantized import quantized_bytes
from ..packed.formats.sparse import of_parts, parts_of, sparse_bytes
from ..saliency.plan import DENSE, Plan, RatePlan, SparsityPlan
from ..saliency.prune_projections import prune_projections


if TYPE_CHECKING:
    from .trials import Trials

SHARES = (2.0, 1.5, 1.2, 1.0, 0.75, 0.45, 0.2)  # kept weights, relative to those kept at the target sparsity


@dataclass(frozen=True, eq=False)
class SolvedWeights(ABC):
    """The weights of all blocks at a few amounts: sparsities, or numbers of bits."""

    name: ClassVar[str]  # of the records
    kind: ClassVar[type[Plan]]

    amounts: tuple[float, ...]  # ascending
    blocks: list[dict[str, torch.Tensor]] = field(default_factory=list)  # tensors of every block; empty if on disk
    records: Records = field(default_factory=Records)  # of the blocks if they are on disk

    @abstractmethod
    def nbytes(self, projection: Projection) -> int:
        """Return the bytes of a projection at all amounts together."""

    @abstractmethod
    def change(self, tensors: Mapping[str, torch.Tensor], plan: Plan, projection: Projection) -> Change:
        """Return the change of a projection by a plan, from the stored tensors of its block."""

    def changes(self, index: int, plans: Sequence[Plan]) -> list[ChangeOf]:
        """Return a function for every plan: projection of the block at an index -> change."""
        found = (None, self.blocks[index]) if self.blocks else self.records.get(self.record_name(index))
        if found is None:
            where = f"{self.record_name(index)} cannot be read from {self.records.directory}"
            raise OSError(f"{where}: the disk is full or failing. Use another disk (work_dir).")
        return [partial(self.change, found[1], plan) for plan in plans]

    def stored(self, tensors: Mapping[str, torch.Tensor], projection: Projection, place: int) -> Change:
        """Return the solved weight of a projection for `amounts[place]`."""
        return of_parts(tensors, f"{projection.name}@{place}", projection.shape, projection.owner.dtype)

    def record_name(self, index: int) -> str:
        return f"{self.name}-{index:05d}"


@dataclass(frozen=True, eq=False)
class SolvedSparsities(SolvedWeights):
    """Weights at a few sparsities in (0, 1). At 0 a weight is the dense one, at 1 it is zero."""

    name: ClassVar[str] = "solved"
    kind: ClassVar[type[Plan]] = SparsityPlan

    @classmethod
    def around(cls, target: float) -> "SolvedSparsities":
        """Return the sparsities to solve for a target in (0, 1)."""
        kept = (share * (1 - target) for share in SHARES)
        return cls(tuple(1 - share for share in kept if share < 1))

    def nbytes(self, projection: Projection) -> int:
        count, size = projection.numel, projection.owner.dtype.itemsize
        return sum(sparse_bytes(projection.shape, round(count * (1 - sparsity)), size) for sparsity in self.amounts)

    def change(self, tensors: Mapping[str, torch.Tensor], plan: Plan, projection: Projection) -> NewWeight:
        known, sparsity = (0.0, *self.amounts, 1.0), float(plan.amounts[projection.name])
        above = next(place for place in range(1, len(known)) if sparsity <= known[place])
        if sparsity == known[above]:
            return NewWeight(self._solved(tensors, projection, above))
        share = (sparsity - known[above - 1]) / (known[above] - known[above - 1])
        below, above = (self._solved(tensors, projection, place) for place in (above - 1, above))
        return NewWeight(torch.lerp(below, above, share))

    def _solved(self, tensors: Mapping[str, torch.Tensor], projection: Projection, place: int) -> torch.Tensor:
        """Return the weight at `(0.0, *amounts, 1.0)[place]`: shape (out, in)."""
        if place == 0:
            return projection.weight
        if place > len(self.amounts):
            return torch.zeros_like(projection.weight)
        return self.stored(tensors, projection, place - 1).applied(projection.weight)


@dataclass(frozen=True, eq=False)
class SolvedRates(SolvedWeights):
    """Weights quantized to a few numbers of bits."""

    name: ClassVar[str] = "rates"
    kind: ClassVar[type[Plan]] = RatePlan

    def nbytes(self, projection: Projection) -> int:
        return sum(quantized_bytes(projection.shape, int(bits), steps=True) for bits in self.amounts)

    def change(self, tensors: Mapping[str, torch.Tensor], plan: Plan, projection: Projection) -> Change:
        bits = plan.amounts[projection.name]
        if bits == DENSE:
            return NewWeight(projection.weight)
        return self.stored(tensors, projection, self.amounts.index(bits))


def solve_weights(trials: "Trials", wanted: SolvedWeights, inputs: BlockInputs) -> SolvedWeights:
    """Solve every projection at the `wanted` amounts, on its inputs in the dense model.

    The weights lie on disk if the blocks do, or if they exceed the runner's `max_hidden_bytes`.
    """
    trials = replace(trials, saliency=trials.saliency.quick())
    runner, records = trials.runner, trials.records
    solved = replace(wanted, blocks=[], records=_place(trials, wanted))

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = runner.replay(block, streams[0], calls, trials.saliency.statistic)
        name = solved.record_name(index)
        _, found = records.recorded(name, lambda: (None, _solve_block(trials, block, norms, wanted)))
        if not solved.records.keeps:
            solved.blocks.append(found)
        elif not records.keeps:
            solved.records.put(name, None, found)
        return [output]

    runner.run(inputs, 1, visit, "solving the weights that candidates are made of", release=True)
    return solved


def _place(trials: "Trials", wanted: SolvedWeights) -> Records:
    """Return the records for solved weights. They have no directory if the weights fit in memory."""
    runner, records, budget = trials.runner, trials.records, trials.runner.max_hidden_bytes
    size = sum(wanted.nbytes(projection) for projection in runner.decoder.projections.values())
    if not runner.loader.streams and (budget is None or size <= budget):
        return Records(processes=records.processes)
    if not records.keeps:
        folder = tempfile.mkdtemp(prefix="optimum-neuronal-")
        records = Records(folder, processes=records.processes)
        weakref.finalize(records, shutil.rmtree, folder, ignore_errors=True)
    return records


def _solve_block(trials: "Trials", block: Block, norms: Norms, wanted: SolvedWeights) -> dict[str, torch.Tensor]:
    tensors = {}
    for place, amount in enumerate(wanted.amounts):
        plan = wanted.kind(dict.fromkeys(block.pruned_names, amount))
        changes, _ = prune_projections(
            trials.saliency, block.pruned, norms, plan, trials.pattern, trials.min_expert_tokens
        )
        for name, change in changes.items():
            tensors |= parts_of(change, block.projections[name].weight, f"{name}@{place}")
    return tensors
