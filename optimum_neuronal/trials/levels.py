"""Weights that a saliency has reconstructed at a few sparsities, from which a trial of any sparsity is interpolated.

A method that updates the weights that stay makes other choices good than one that leaves them. To solve anew for every
candidate would take too long; between two solutions of near sparsities the weights change little.
"""

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..engine.calls import Call
from ..engine.capture import BlockInputs
from ..engine.passes import CalibrationPass, Runs
from ..engine.runner import BlockRunner
from ..engine.streams import Streams
from ..files.journal import Journal
from ..formats.bitmask import packed_bytes
from ..formats.packed import PackedWeight
from ..model.projections import Block, Projection
from ..model.trial import ChangeOf
from ..sparsity.masks import NewWeight
from ..sparsity.plan import SparsityPlan
from .applier import PlanApplier
from .records import Finding, StepRecords


SHARES = (2.0, 1.5, 1.2, 1.0, 0.75, 0.45, 0.2)  # of the kept weights at the target sparsity, from level to level
LABEL = "Levels"
GOLDEN = (5**0.5 - 1) / 2  # multiples of it are spread evenly over [0, 1) but for whole numbers


def level_sparsities(target: float, rounded: bool = False) -> tuple[float, ...]:
    """The sparsities that are solved for, ascending: narrow around the target, wide far from it.

    Args:
        target (`float`): of all projections, in (0, 1).
        rounded (`bool`): whether values are of few bits. The weight without a zero is then not as it was, but a level too.
    """
    kept = (share * (1 - target) for share in SHARES)
    return (*([0.0] if rounded else []), *(1 - share for share in kept if share < 1))


class LevelsPass(CalibrationPass):
    """What [`solve_levels`] costs, but for the solving."""

    def count_sequences(self, samples: int, alignment: int) -> int:
        return samples - heldout_sequences(samples, alignment)

    def runs(self, index: int, last: int) -> Runs:
        return 1, 0, 0


@dataclass(frozen=True, eq=False)
class Levels:
    """The weights of all blocks at every level.

    Args:
        sparsities (`tuple[float, ...]`): of the levels, ascending, in [0, 1). Beside them, at 0 the weight is as it is,
            if no level is there, and at 1 it is zero.
        rounded (`bool`):
            Whether values are of few bits. Between two levels then lie weights with rows of both: a mean of two rounded
            values would hide half of what rounding loses.
        blocks (`list[dict[str, Tensor]]`): of every block the packed weights by name and level; empty if on disk.
        journal ([`Journal`]): holds them if they are on disk.
        name (`str`): what they are recorded under.
    """

    sparsities: tuple[float, ...]
    rounded: bool = False
    blocks: list[dict[str, torch.Tensor]] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    name: str = "levels"

    def changes(self, index: int, plans: Sequence[SparsityPlan]) -> list[ChangeOf]:
        """For every plan, what it makes of a projection of the block of an index.

        Raises:
            `ValueError`: a plan has sparsities by row.
            `OSError`: what was on disk is gone, or damaged.
        """
        tensors = self.blocks[index] if self.blocks else self._read(index)
        return [partial(self._change, tensors, plan) for plan in plans]

    def _read(self, index: int) -> dict[str, torch.Tensor]:
        found = self.journal.get(self.record_name(index))
        if found is None:
            raise OSError(
                f"{self.record_name(index)} cannot be read back from {self.journal.directory}, whose disk is full or fails: run "
                "it again on another disk (work_dir), or set levels=False in topup_args."
            )
        return found[1]

    def _change(self, tensors: dict[str, torch.Tensor], plan: SparsityPlan, projection: Projection) -> NewWeight:
        sparsity = plan.sparsity[projection.name]
        if isinstance(sparsity, torch.Tensor) and sparsity.ndim:
            raise ValueError(f"{projection.name} was given a sparsity by row: levels are of whole projections.")
        return NewWeight(self._weight(tensors, projection, float(sparsity)))

    def record_name(self, index: int) -> str:
        """What the levels of the block of an index are recorded under."""
        return f"{self.name}-{index:05d}"

    def _weight(self, tensors: dict[str, torch.Tensor], projection: Projection, sparsity: float) -> torch.Tensor:
        """The weight at any sparsity, shape (out, in), in the projection's dtype and on its device."""
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
    """About a share of all rows, spread evenly; boolean, shape (rows,). Of a larger share they are a part."""
    places = torch.arange(1, rows + 1, dtype=torch.float64) * GOLDEN
    return (places.frac() < share).to(device)


def heldout_sequences(samples: int, alignment: int) -> int:
    """How many calibration sequences, from the first, levels are not solved on: those of the trials, if enough are left."""
    return alignment if samples >= 2 * alignment else 0


def solve_levels(
    runner: BlockRunner,
    solvers: Mapping[float, PlanApplier],
    records: StepRecords,
    inputs: BlockInputs,
    budget: int | None,
    name: str = "levels",
    label: str = LABEL,
) -> Levels:
    """Solves every projection at every level, on the inputs that it has in the dense model.

    Args:
        runner ([`BlockRunner`]): runs the blocks.
        solvers (`Mapping[float, PlanApplier]`): sparsity of a level, ascending, in [0, 1) -> what makes its weights.
        records ([`StepRecords`]): what is finished is looked up here.
        inputs ([`BlockInputs`]): what the blocks are called with for the calibration sequences to solve on.
        budget (`int`, *optional*): bytes beyond which they lie on disk, where recorded steps lie; None: no bound.
        name, label (`str`): what they are recorded under, and what the progress bar calls the run.

    Raises:
        `ValueError`: the disk has no room for them.
    """
    solvers = {sparsity: applier.quick() for sparsity, applier in solvers.items()}
    statistic = next(iter(solvers.values())).saliency.statistic
    rounded = any(solver.value_bits is not None for solver in solvers.values())
    levels = _placed(runner, records, Levels(tuple(solvers), rounded, name=name), budget)

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = runner.replay(block, streams[0], calls, statistic)

        def solve() -> Finding:
            return None, _solve_block(solvers, block, norms)

        found = records.recorded(levels.record_name(index), solve)[1]
        if levels.journal.keeps:
            if not records.journal.keeps:
                levels.journal.put(levels.record_name(index), None, found)
        else:
            levels.blocks.append(found)
        return [output]

    runner.run(inputs, 1, visit, label, release=True)
    return levels


def _placed(runner: BlockRunner, records: StepRecords, levels: Levels, budget: int | None) -> Levels:
    """The levels, of which nothing is solved yet, with a place on disk if they are not to lie in memory."""
    size = sum(levels_bytes(block, levels.sparsities) for block in runner.decoder.blocks)
    if not runner.loader.streams and (budget is None or size <= budget):
        return levels
    journal = records.journal
    if not journal.keeps:
        folder = tempfile.mkdtemp(prefix="optimum-neuronal-")
        journal = Journal(folder)
        weakref.finalize(journal, shutil.rmtree, folder, ignore_errors=True)
    if not journal.has_room(size):
        raise ValueError(
            f"The projections at {len(levels.sparsities)} sparsities take {size / 1e9:.1f} GB, more than the disk of "
            f"{journal.directory or tempfile.gettempdir()} has free: name a larger one as work_dir, or set levels=False in topup_args."
        )
    return replace(levels, journal=journal)


def levels_bytes(block: Block, sparsities: Sequence[float]) -> int:
    """Bytes of a block's projections at these sparsities, packed."""
    weights = [(p.numel, p.owner.dtype.itemsize) for p in block.pruned]
    return sum(packed_bytes(n, round(n * (1 - sparsity)), size) for n, size in weights for sparsity in sparsities)


def _solve_block(solvers: Mapping[float, PlanApplier], block: Block, norms) -> dict[str, torch.Tensor]:
    tensors = {}
    for place, (sparsity, solver) in enumerate(solvers.items()):
        activations, _ = solver.activations(block, norms)
        plan = SparsityPlan(dict.fromkeys(block.pruned_names, sparsity))
        for name, weight in solver.weights(block.pruned, norms, activations, plan).items():
            tensors |= PackedWeight.pack(weight).parts(f"{name}@{place}")
    return tensors
