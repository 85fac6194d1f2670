"""Several processes on one prune: who does what, and how results come together (torch.distributed).

Nothing here depends on how many processes there are: candidates and calibration sequences are handed out whole, and
what is measured on them is put together in their order.
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

PATIENCE = 10.0  # seconds after which it is said that other processes are waited for
LEFT = "If no torchrun has started this process, take its variables away: unset WORLD_SIZE RANK LOCAL_RANK."


@dataclass(frozen=True)
class Processes:
    """This process and its companions; one alone where torch.distributed is not in use.

    Args:
        rank (`int`): which process this is, from 0.
        count (`int`): how many there are.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> "Processes":
        """The process group that torchrun, `accelerate launch` or the caller's code has set up."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def deal(self, items: Sequence) -> list:
        """Every `count`-th item, beginning with this process's: candidates, whose costs are alike."""
        return list(items[self.rank :: self.count])

    def collect(self, dealt: list) -> list:
        """All items in their order, from what every process made of those it was dealt; the same everywhere."""
        if self.count == 1:
            return dealt
        hands: list[list] = [[] for _ in range(self.count)]
        distributed.all_gather_object(hands, dealt)
        return [hands[index % self.count][index // self.count] for index in range(sum(map(len, hands)))]

    def part(self, length: int) -> slice:
        """Which of so many sequences are this process's: consecutive ones; all if there are not enough to share."""
        if not self.shares(length):
            return slice(0, length)
        bounds = [length * rank // self.count for rank in range(self.count + 1)]
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def shares(self, length: int) -> bool:
        """Whether so many sequences are shared out."""
        return self.count > 1 and length >= self.count

    def join(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Rows of all processes' parts, shape (length, ...), in order, from this process's rows."""
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
        """What process 0 has, everywhere."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def process_group() -> Iterator[Processes]:
    """Joins the processes that torchrun or `accelerate launch` has started, if it has, while the context lasts.

    The backend is gloo on CPUs and the accelerator's own elsewhere; every process takes the accelerator of its number.
    A warning tells if the others do not come.

    Raises:
        `ValueError`: the environment variables that torchrun sets are there in part only, or hold no numbers.
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
    with _told_of_waiting(f"process {rank} waits at {os.environ['MASTER_ADDR']}:{port} for the {count - 1} others"):
        distributed.init_process_group()
    try:
        yield Processes.current()
    finally:
        distributed.destroy_process_group()


def _variable(name: str, default: str | None = None) -> int:
    """An environment variable of torchrun's."""
    value = os.environ.get(name, default)
    if value is None or not value.isdecimal():
        raise ValueError(f"The environment variable {name} is {value!r}, where torchrun sets a number. {LEFT}")
    return int(value)


@contextmanager
def _told_of_waiting(what: str) -> Iterator[None]:
    """Warns if the context lasts longer than processes take to start."""
    message = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: {what}, which have not come yet. {LEFT}"
    timer = Timer(PATIENCE, logger.warning, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
