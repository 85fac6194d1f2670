"""Weights of all blocks that were solved before trials at a few amounts: at sparsities, or at bits."""

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from ..blocks.block_inputs import BlockInputs
from ..blocks.calls import Call, Streams
from ..blocks.runner import BlockRunner
from ..blocks.statistics import Norms
from ..files.records import Records
from ..model.projections import Block, ChangeOf, Projection
from ..packed.change import Change
from ..packed.formats.stored_changes import of_parts, parts_of
from ..saliency.changes import prune_projections
from ..saliency.plan import Plan


if TYPE_CHECKING:
    from .trials import Trials


@dataclass(frozen=True, eq=False)
class SolvedWeights(ABC):
    """The weights of all blocks at a few amounts.

    Args:
        amounts (`tuple[float, ...]`): that weights are solved at, ascending.
        blocks (`list[dict[str, Tensor]]`): the solved weights of every block by name and amount; empty if on disk.
        records ([`Records`]): hold the weights if they are on disk.

    Class attributes:
        name (`str`): of their records. `label` (`str`): of the progress bar.
        instead (`str`): advice where the disk has no room for them.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    instead: ClassVar[str]

    amounts: tuple[float, ...]
    blocks: list[dict[str, torch.Tensor]] = field(default_factory=list)
    records: Records = field(default_factory=Records)

    @abstractmethod
    def plan(self, names: Iterable[str], place: int) -> Plan:
        """Return the plan that gives these projections the amount of a place in `amounts`."""

    @abstractmethod
    def nbytes(self, projection: Projection) -> int:
        """Return the bytes that a projection takes at all amounts."""

    @abstractmethod
    def change(self, tensors: Mapping[str, torch.Tensor], plan: Plan, projection: Projection) -> Change:
        """Return the change of a projection by a plan, from the tensors of its block."""

    def changes(self, index: int, plans: Sequence[Plan]) -> list[ChangeOf]:
        """Return a function for every plan: projection of the block of an index -> change.

        Raises:
            `ValueError`: a plan has numbers by row.
            `OSError`: the records on disk are gone or damaged.
        """
        tensors = self.blocks[index] if self.blocks else self._read(index)
        return [partial(self.change, tensors, plan) for plan in plans]

    def stored(self, tensors: Mapping[str, torch.Tensor], projection: Projection, place: int) -> Change:
        """Return the solved weight of a projection at the amount of a place in `amounts`."""
        return of_parts(tensors, f"{projection.name}@{place}", projection.shape, projection.owner.dtype)

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
            f"it again on another disk (work_dir), or {self.instead}."
        )


Solved = TypeVar("Solved", bound=SolvedWeights)


def heldout_sequences(samples: int, alignment: int) -> int:
    """Return how many sequences, from the first, weights are not solved on: the alignment ones, if enough are left."""
    return alignment if samples >= 2 * alignment else 0


def solve_weights(trials: "Trials", wanted: Solved, inputs: BlockInputs) -> Solved:
    """Solve every projection at every amount, on its inputs in the dense model.

    The weights lie on disk if the blocks do, or if they exceed the runner's `max_hidden_bytes`.

    Args:
        trials ([`Trials`]): of the model.
        wanted ([`SolvedWeights`]): the amounts, still without weights.
        inputs ([`BlockInputs`]): the blocks' calls for the calibration sequences to solve on.

    Raises:
        `ValueError`: the disk has no room for them.
        `OSError`: it fills up meanwhile, or fails.
    """
    trials = replace(trials, saliency=trials.saliency.quick())
    runner, records = trials.runner, trials.records
    solved = replace(wanted, blocks=[], records=_place(runner, records, wanted))

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        output, norms = runner.replay(block, streams[0], calls, trials.saliency.statistic)
        name = solved.record_name(index)
        _, found = records.recorded(name, lambda: (None, _solve_block(trials, block, norms, wanted)))
        if not solved.records.keeps:
            solved.blocks.append(found)
        else:
            if not records.keeps:
                solved.records.put(name, None, found)
            solved.check_recorded(index)
        return [output]

    runner.run(inputs, 1, visit, wanted.label, release=True)
    return solved


def _place(runner: BlockRunner, records: Records, wanted: SolvedWeights) -> Records:
    """Return the records for solved weights; records without a directory if they are to lie in memory."""
    size = sum(wanted.nbytes(projection) for projection in runner.decoder.projections.values())
    budget = runner.max_hidden_bytes
    if not runner.loader.streams and (budget is None or size <= budget):
        return Records(processes=records.processes)
    if not records.keeps:
        folder = tempfile.mkdtemp(prefix="optimum-neuronal-")
        records = Records(folder, processes=records.processes)
        weakref.finalize(records, shutil.rmtree, folder, ignore_errors=True)
    if not records.has_room(size):
        raise ValueError(
            f"The projections, solved {len(wanted.amounts)} times, take {size / 1e9:.1f} GB, more than the disk of "
            f"{records.directory or tempfile.gettempdir()} has free: name a larger one as work_dir, or {wanted.instead}."
        )
    return records


def _solve_block(trials: "Trials", block: Block, norms: Norms, wanted: SolvedWeights) -> dict[str, torch.Tensor]:
    tensors = {}
    for place in range(len(wanted.amounts)):
        plan = wanted.plan(block.pruned_names, place)
        changes, _ = prune_projections(
            trials.saliency, block.pruned, norms, plan, trials.pattern, trials.min_expert_tokens
        )
        for name, change in changes.items():
            tensors |= parts_of(change, block.projections[name].weight, f"{name}@{place}")
    return tensors
