"""The machine: its device, memory and Ctrl-C, and the processes that share a prune (torch.distributed).

Candidates and calibration sequences are distributed whole, and results are joined in order, so they do not depend on the
number of processes.
"""

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed


_precision_lock = threading.Lock()
_precision_users = 0  # of `full_precision`
_user_precision = ExitStack()  # restores the user's settings


def default_device() -> torch.device:
    """Return the accelerator, or the CPU if there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def time_on(device: torch.device) -> float:
    """Return the time in seconds when all work that a device was given is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def multiplies_bfloat16() -> bool:
    """Return True if the CPU multiplies bfloat16 matrices several times as fast as float32 ones (AMX).

    False with a torch that cannot tell.
    """
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 matrix products without TensorFloat-32 or bfloat16; restore the user's settings afterwards.

    The settings are those of the process: the first of several threads changes them, and the last one restores them.
    """
    global _precision_users
    with _precision_lock:
        if _precision_users == 0:
            _user_precision.enter_context(_highest_precision())
        _precision_users += 1
    try:
        yield
    finally:
        with _precision_lock:
            _precision_users -= 1
            if _precision_users == 0:
                _user_precision.close()


@contextmanager
def _highest_precision() -> Iterator[None]:
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    own, of_all = [backend.fp32_precision for backend in backends], None
    with suppress(RuntimeError):  # one backend differs
        of_all = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if of_all is not None:
            torch.set_float32_matmul_precision(of_all)
        for backend, precision in zip(backends, own):
            backend.fp32_precision = precision


def hand_back_freed() -> None:
    """Let glibc return freed memory to the system: otherwise it keeps a tenth of a model that was read in pieces."""
    with suppress(AttributeError, TypeError):  # another C library, or Windows
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak_memory() -> None:
    """Reset the result of [`peak_memory`], on accelerators and on Linux."""
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.reset_peak_memory_stats(index)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> dict[str, int]:
    """Return the peak memory in bytes: of this process (`"host"`, on Linux) and of the accelerators that it uses."""
    peaks = {}
    with suppress(OSError, TypeError):  # no such file, or no such line
        # The process's name stands there too, in any bytes.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        peaks["host"] = int(re.search(r"^VmHWM:\s+(\d+)", status, re.M)[1]) * 1024
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        for index in range(torch.accelerator.device_count()):
            if size := torch.accelerator.max_memory_allocated(index):
                peaks[f"{kind}:{index}"] = size
    return peaks


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the context, in which weights change, ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if received:
        raise KeyboardInterrupt


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

    def collect(self, dealt: list) -> list:
        """Return the results of all dealt items in order, in every process."""
        if self.count == 1:
            return dealt
        hands: list[list] = [[] for _ in range(self.count)]
        distributed.all_gather_object(hands, dealt)
        return [hands[index % self.count][index // self.count] for index in range(sum(map(len, hands)))]

    def part(self, length: int) -> slice:
        """Return this process's slice of the sequences: all of them if there are fewer than processes."""
        if not self.shares(length):
            return slice(0, length)
        bounds = [length * rank // self.count for rank in range(self.count + 1)]
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def shares(self, length: int) -> bool:
        return self.count > 1 and length >= self.count

    def join(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Return the rows of all processes' parts in order, shape (length, ...)."""
        if not self.shares(length):
            return rows
        longest = -(-length // self.count)
        padded = rows.new_zeros(longest, *rows.shape[1:])  # gloo gathers tensors of one shape
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in range(self.count)]
        distributed.all_gather(gathered, padded)
        sizes = (Processes(rank, self.count).part(length) for rank in range(self.count))
        return torch.cat([part[: size.stop - size.start] for part, size in zip(gathered, sizes)])

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
