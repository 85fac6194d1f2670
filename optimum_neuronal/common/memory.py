"""Memory: how much a run may use, its peak, and what is returned to the system."""

import ctypes
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from .validation import check_count


@dataclass(frozen=True)
class MemoryLimits:
    """How much memory a run may use. Checked when made.

    Args:
        batch_size (`int`, *optional*): sequences per forward pass. None: as many as keep a processor busy.
        max_hidden_bytes (`int`, *optional*):
            Hidden states beyond this many bytes are kept in CPU memory. None: they stay on the device.
    """

    batch_size: int | None = None
    max_hidden_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("batch_size", self.batch_size, 1), ("max_hidden_bytes", self.max_hidden_bytes, 0)):
            if value is not None:
                check_count(name, value, least)


UNLIMITED = MemoryLimits()


def trim_heap() -> None:
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
    with suppress(OSError, TypeError):  # the file or the line is missing
        # The file also holds the process's name, in any bytes.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        peaks["host"] = int(re.search(r"^VmHWM:\s+(\d+)", status, re.M)[1]) * 1024
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        for index in range(torch.accelerator.device_count()):
            if size := torch.accelerator.max_memory_allocated(index):
                peaks[f"{kind}:{index}"] = size
    return peaks
