"""What steps of a prune have found: recorded, so that none is done twice, and the same in all processes."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from ..engine.unfinished import UnfinishedRun
from ..files.journal import Journal
from ..sparsity.plan import SparsityPlan
from ..system.processes import Processes


Finding = tuple[Any, dict[str, torch.Tensor]]  # a JSON value and tensors


class StepRecords:
    """Looks finished steps up, or has them done and records them.

    Args:
        journal ([`Journal`], *optional*): where finished steps and blocks are recorded, and looked up.
        processes ([`Processes`], *optional*): with whom the work is shared.
    """

    def __init__(self, journal: Journal | None = None, processes: Processes | None = None):
        self.journal, self.processes = journal or Journal(), processes or Processes()

    def once(
        self, plans: Sequence[SparsityPlan], asked: tuple, measure: Callable[[UnfinishedRun], Finding]
    ) -> Finding:
        """What a step measures on plans, recorded or measured now.

        Recorded under what was asked of it, since another number of processes or weights on disk ask otherwise.

        Args:
            plans (`Sequence[SparsityPlan]`), asked (`tuple`): what the finding depends on.
            measure: is given the record of its own run over the blocks, and returns the finding.
        """
        if not self.journal.keeps and self.processes.count == 1:
            return measure(UnfinishedRun())
        digest = hashlib.sha256(repr(asked).encode())
        for name, value in (item for plan in plans for item in plan.sparsity.items()):
            digest.update(name.encode() + torch.as_tensor(value, dtype=torch.float64).numpy().tobytes())
        name = f"step-{digest.hexdigest()[:16]}"
        unfinished = f"{name}-unfinished"
        # Of several processes each has streams of its own, which no other number of them could go on with.
        run = UnfinishedRun(self.journal, unfinished if self.processes.count == 1 else "")
        found = self.recorded(name, partial(measure, run))
        self.journal.drop(unfinished)
        return found

    def recorded(self, name: str, make: Callable[[], Finding]) -> Finding:
        """What was recorded under a name, or is made now and recorded; the same in all processes."""
        found = self.processes.from_first(self.journal.get(name))
        if found is None:
            found = make()
            if self.processes.rank == 0:
                self.journal.put(name, *found)
        return found


class Kept:
    """What was found once and may be asked for again: hidden states, dense activations, scores.

    Args:
        lasting (`bool`): prunes of the same model and sequences share it, so nothing of it is let go before the end.
    """

    def __init__(self, lasting: bool = False):
        self.lasting = lasting
        self._found: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What was made under a key before, or is made now and kept."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def release(self) -> None:
        """Lets go of everything, unless it is shared."""
        if not self.lasting:
            self._found.clear()
