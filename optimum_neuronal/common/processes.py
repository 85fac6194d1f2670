"""Several processes on one prune: how they share the work and join its results (torch.distributed).

No result depends on the number of processes: candidates and calibration sequences are handed out whole, and their
results are joined in their order.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any

import torch
from torch import distributed

from .notes import get_logger


logger = get_logger(__name__)

PATIENCE = 10.0  # seconds before the warning that other processes have not come
LEFT = "If no torchrun has started this process, take its variables away: unset WORLD_SIZE RANK LOCAL_RANK."


@dataclass(frozen=True)
class Processes:
    """This process among all; the only one if torch.distributed is not in use.

    Args:
        rank (`int`): number of this process, from 0.
        count (`int`): number of processes.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> "Processes":
        """Return the process group that torchrun, `accelerate launch` or the caller's code has set up."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def deal(self, items: Sequence) -> list:
        """Return every `count`-th item from this process's on: for candidates, whose costs are alike."""
        return list(items[self.rank :: self.count])

    def collect(self, dealt: list) -> list:
        """Return the results of all dealt items in their order, in every process, from each process's results."""
        if self.count == 1:
            return dealt
        hands: list[list] = [[] for _ in range(self.count)]
        distributed.all_gather_object(hands, dealt)
        return [hands[index % self.count][index // self.count] for index in range(sum(map(len, hands)))]

    def part(self, length: int) -> slice:
        """Return this process's slice of a number of sequences: all if there are too few to share."""
        if not self.shares(length):
            return slice(0, length)
        bounds = [length * rank // self.count for rank in range(self.count + 1)]
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def shares(self, length: int) -> bool:
        """Return True if this number of sequences is shared between processes."""
        return self.count > 1 and length >= self.count

    def join(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Return the rows of all processes' parts, shape (length, ...), in order, from this process's rows."""
        if not self.shares(length):
            return rows
        largest = -(-length // self.count)
        padded = rows.new_zeros(largest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        distributed.all_gather(parts, padded)
        sizes = (Processes(rank, self.count).part(length) for rank in range(self.count))
        return torch.cat([part[: size.stop - size.start] for part, size in zip(parts, sizes)])

    def from_first(self, value: Any) -> Any:
        """Return process 0's value in every process."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def process_group() -> Iterator[Processes]:
    """Join the processes that torchrun or `accelerate launch` has started, if any, while the context lasts.

    The backend is gloo on CPUs and the accelerator's own elsewhere; every process takes the accelerator of its number.
    It warns if the other processes do not come.

    Raises:
        `ValueError`: torchrun's environment variables are set in part only, or are no numbers.
    """
    if distributed.is_initialized() or _variable("WORLD_SIZE", "1") == 1:
        yield Processes.current()
        return
    rank, count, port = (_variable(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not os.environ.get("MASTER_ADDR") or not 0 <= rank < count:
        raise ValueError(
            f"RANK is {rank} of WORLD_SIZE {count}, MASTER_ADDR is {os.environ.get('MASTER_ADDR')!r}. {LEFT}"
        )
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(_variable("LOCAL_RANK", "0"))
    with _warning_if_late(f"process {rank} waits at {os.environ['MASTER_ADDR']}:{port} for the {count - 1} others"):
        distributed.init_process_group()
    try:
        yield Processes.current()
    finally:
        distributed.destroy_process_group()


def _variable(name: str, default: str | None = None) -> int:
    """Return an environment variable of torchrun's."""
    value = os.environ.get(name, default)
    if value is None or not value.isdecimal():
        raise ValueError(f"The environment variable {name} is {value!r}, where torchrun sets a number. {LEFT}")
    return int(value)


@contextmanager
def _warning_if_late(what: str) -> Iterator[None]:
    """Warn if the context lasts longer than processes take to start."""
    message = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: {what}, which have not come yet. {LEFT}"
    timer = Timer(PATIENCE, logger.warning, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
