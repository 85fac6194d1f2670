"""The processes that share a pruning run (torch.distributed).

Candidates and calibration sequences are distributed whole, and results are joined in order, so they do not depend on the
number of processes.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


@dataclass(frozen=True)
class Processes:
    """This process among all; the only one if torch.distributed is not in use."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> "Processes":
        """Return the process group that torchrun, `accelerate launch` or the caller's code has set up."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def deal(self, items: Sequence) -> list:
        """Return every `count`-th item, starting with this process's number."""
        return list(items[self.rank :: self.count])

    def _gather(self, value: Any) -> list:
        values: list = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def collect(self, dealt: list) -> list:
        """Return the results of all dealt items in order, in every process."""
        if self.count == 1:
            return dealt
        hands = self._gather(dealt)
        return [hands[index % self.count][index // self.count] for index in range(sum(map(len, hands)))]

    def part(self, length: int) -> slice:
        """Return this process's slice of the sequences."""
        bounds = [length * rank // self.count for rank in range(self.count + 1)]
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def splits(self, length: int) -> bool:
        return self.count > 1 and length >= self.count

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all processes' parts in order."""
        return torch.cat(self._gather(rows.cpu())).to(rows.device)

    def from_first(self, value: Any) -> Any:
        """Return process 0's value in every process."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def process_group() -> Iterator[Processes]:
    """Join the processes that torchrun or `accelerate launch` has started, if any. Each uses the device of its local rank."""
    # In this order: torch can be built without distributed.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or distributed.is_initialized():
        yield Processes.current()
        return
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group()
    try:
        yield Processes.current()
    finally:
        distributed.destroy_process_group()
