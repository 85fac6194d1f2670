"""Weights that a saliency has solved at a few sparsities, from which a trial of any sparsity is interpolated.

A method that updates the kept weights makes other choices good than a method that leaves them. To solve anew for every
candidate would take too long. Between two solutions of near sparsities the weights change little.
"""

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ..engine.calls import Call, Streams
from ..engine.capture import BlockInputs
from ..engine.runner import BlockRunner
from ..engine.statistics import Norms
from ..files.records import Records
from ..formats.bitmask import packed_bytes
from ..formats.packed import PackedWeight
from ..model.projections import Block, ChangeOf, Projection
from ..sparsity.masks import NewWeight
from ..sparsity.plan import SparsityPlan
from .applier import PlanApplier


SHARES = (2.0, 1.5, 1.2, 1.0, 0.75, 0.45, 0.2)  # of the kept weights at the target sparsity, from level to level
LABEL = "Levels"
GOLDEN = (5**0.5 - 1) / 2  # multiples of it are spread evenly over [0, 1) but for whole numbers


def level_sparsities(target: float, rounded: bool = False) -> tuple[float, ...]:
    """Return the sparsities to solve, ascending: narrow around the target, wide far from it.

    Args:
        target (`float`): of all projections, in (0, 1).
        rounded (`bool`): True if values are quantised. The weight without a zero then changes too, and is a level.
    """
    kept = (share * (1 - target) for share in SHARES)
    return (*([0.0] if rounded else []), *(1 - share for share in kept if share < 1))


@dataclass(frozen=True, eq=False)
class Levels:
    """The weights of all blocks at every level.

    Args:
        sparsities (`tuple[float, ...]`):
            Of the levels, ascending, in [0, 1). At 0 the weight is the dense one, if no level is there; at 1 it is zero.
        rounded (`bool`):
            True if values are quantised. A weight between two levels then has rows of both: a mean of two rounded
            values would hide half of the loss by rounding.
        blocks (`list[dict[str, Tensor]]`): the packed weights of every block by name and level; empty if on disk.
        records ([`Records`]): hold the weights if they are on disk.
        name (`str`): of their records.
    """

    sparsities: tuple[float, ...]
    rounded: bool = False
    blocks: list[dict[str, torch.Tensor]] = field(default_factory=list)
    records: Records = field(default_factory=Records)
    name: str = "levels"

    def changes(self, index: int, plans: Sequence[SparsityPlan]) -> list[ChangeOf]:
        """Return a function for every plan: projection of the block of an index -> change.

        Raises:
            `ValueError`: a plan has sparsities by row.
            `OSError`: the records on disk are gone or damaged.
        """
        tensors = self.blocks[index] if self.blocks else self._read(index)
        return [partial(self._change, tensors, plan) for plan in plans]

    def record_name(self, index: int) -> str:
        """Return the record's name for the block of an index."""
        return f"{self.name}-{index:05d}"

    def check_recorded(self, index: int) -> None:
        """Raise `OSError` if the records do not hold a block's weights: trials of them could not go on."""
        if not self.records.holds(self.record_name(index)):
            raise self._missing(index)

    def _read(self, index: int) -> dict[str, torch.Tensor]:
        found = self.records.get(self.record_name(index))
        if found is None:
            raise self._missing(index)
        return found[1]

    def _missing(self, index: int) -> OSError:
        return OSError(
            f"{self.record_name(index)} cannot be read back from {self.records.directory}, whose disk is full or fails: run "
            "it again on another disk (work_dir), or set levels=False in topup_args."
        )

    def _change(self, tensors: dict[str, torch.Tensor], plan: SparsityPlan, projection: Projection) -> NewWeight:
        sparsity = plan.sparsity[projection.name]
        if isinstance(sparsity, torch.Tensor) and sparsity.ndim:
            raise ValueError(f"{projection.name} was given a sparsity by row: levels are of whole projections.")
        return NewWeight(self._weight(tensors, projection, float(sparsity)))

    def _weight(self, tensors: dict[str, torch.Tensor], projection: Projection, sparsity: float) -> torch.Tensor:
        """Return the weight at any sparsity, shape (out, in), in the projection's dtype and on its device."""
        known = (0.0, *self.sparsities, 1.0)
        above = next(place for place in range(1, len(known)) if sparsity <= known[place])
        if sparsity == known[above]:
            return self._level(tensors, projection, above)
        share = (sparsity - known[above - 1]) / (known[above] - known[above - 1])
        lower, upper = (self._level(tensors, projection, place) for place in (above - 1, above))
        if self.rounded:
            return torch.where(spread_rows(len(lower), share, lower.device)[:, None], upper, lower)
        return torch.lerp(lower, upper, share)

    def _level(self, tensors: dict[str, torch.Tensor], projection: Projection, place: int) -> torch.Tensor:
        if place == 0:
            return projection.weight
        if place > len(self.sparsities):
            return torch.zeros_like(projection.weight)
        key = f"{projection.name}@{place - 1}"
        return PackedWeight.of_parts(tensors, key, projection.shape).unpack(projection.weight.device)


def spread_rows(rows: int, share: float, device: torch.device) -> torch.Tensor:
    """Return about a share of all rows, spread evenly: boolean, shape (rows,). A larger share includes them all."""
    places = torch.arange(1, rows + 1, dtype=torch.float64) * GOLDEN
    return (places.frac() < share).to(device)


def heldout_sequences(samples: int, alignment: int) -> int:
    """Return how many sequences, from the first, levels are not solved on: the alignment ones, if enough are left."""
    return alignment if samples >= 2 * alignment else 0


def solve_levels(
    runner: BlockRunner,
    solvers: Mapping[float, PlanApplier],
    records: Records,
    inputs: BlockInputs,
    name: str = "levels",
    label: str = LABEL,
) -> Levels:
    """Solve every projection at every level, on its inputs in the dense model.

    The weights lie on disk if the blocks do, or if they exceed the runner's `max_hidden_bytes`.

    Args:
        runner ([`BlockRunner`]): runs the blocks.
        solvers (`Mapping[float, PlanApplier]`): sparsity of a level, ascending, in [0, 1) -> maker of its weights.
        records ([`Records`]): of finished blocks.
        inputs ([`BlockInputs`]): the blocks' calls for the calibration sequences to solve on.
        name, label (`str`): of the records, and of the progress bar.

    Raises:
        `ValueError`: the disk has no room for them.
        `OSError`: it fills up meanwhile, or fails.
    """
    solvers = {sparsity: applier.quick() for sparsity, applier in solvers.items()}
    statistic = next(iter(solvers.values())).saliency.statistic
    rounded = any(solver.value_bits is not None for solver in solvers.values())
    levels = Levels(tuple(solvers), rounded, records=_place(runner, records, tuple(solvers)), name=name)

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = runner.replay(block, streams[0], calls, statistic)
        name = levels.record_name(index)
        _, found = records.recorded(name, lambda: (None, _solve_block(solvers, block, norms)))
        if not levels.records.keeps:
            levels.blocks.append(found)
        else:
            if not records.keeps:
                levels.records.put(name, None, found)
            levels.check_recorded(index)
        return [output]

    runner.run(inputs, 1, visit, label, release=True)
    return levels


def _place(runner: BlockRunner, records: Records, sparsities: Sequence[float]) -> Records:
    """Return the records for the weights of levels; records without a directory if they are to lie in memory."""
    size, budget = sum(levels_bytes(block, sparsities) for block in runner.decoder.blocks), runner.max_hidden_bytes
    if not runner.loader.streams and (budget is None or size <= budget):
        return Records(processes=records.processes)
    if not records.keeps:
        folder = tempfile.mkdtemp(prefix="optimum-neuronal-")
        records = Records(folder, processes=records.processes)
        weakref.finalize(records, shutil.rmtree, folder, ignore_errors=True)
    if not records.has_room(size):
        raise ValueError(
            f"The projections at {len(sparsities)} sparsities take {size / 1e9:.1f} GB, more than the disk of "
            f"{records.directory or tempfile.gettempdir()} has free: name a larger one as work_dir, or set levels=False in "
            "topup_args."
        )
    return records


def levels_bytes(block: Block, sparsities: Sequence[float]) -> int:
    """Return the bytes of a block's projections at these sparsities, packed."""
    weights = [(p.numel, p.owner.dtype.itemsize) for p in block.pruned]
    return sum(packed_bytes(n, round(n * (1 - sparsity)), size) for n, size in weights for sparsity in sparsities)


def _solve_block(solvers: Mapping[float, PlanApplier], block: Block, norms: Norms) -> dict[str, torch.Tensor]:
    tensors = {}
    for place, (sparsity, solver) in enumerate(solvers.items()):
        activations, _ = solver.activations(block, norms)
        plan = SparsityPlan(dict.fromkeys(block.pruned_names, sparsity))
        for name, change in solver.prune(block.pruned, norms, activations, plan).items():
            weight = change.applied(block.projections[name].weight)
            tensors |= PackedWeight.pack(weight).parts(f"{name}@{place}")
    return tensors
